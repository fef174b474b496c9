"""`hf:NAME`: the rows of a data set as tasks, from the Hugging Face Hub or a folder, read by its package `datasets`."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError, missing_extra

PREFIX = "hf:"
_NAME = re.compile(r"(?P<name>[^:@]+)(:(?P<subset>[^:@]+))?(@(?P<split>.+))?")
_DECODED = ("Image", "Audio", "Video", "Pdf", "Nifti")
"""Types of columns that the package turns into objects."""
_FIRST_WITHOUT_CODE = 4
"""Since this version of `datasets` a data set is data: older ones run scripts that lie beside it."""


def load_rows(spec: str) -> list[Any]:
    """The rows of `hf:NAME[:SUBSET][@SPLIT]`, each an object by its columns; dates and times become ISO 8601.

    NAME is a name on the Hub ("openai/gsm8k") or a folder, and SPLIT ("train" if it is not given) may be cut as the
    package has it: "train[:200]". Raises ConfigError where that is nothing, and for columns that are no JSON values.
    """
    matched = _NAME.fullmatch(spec.removeprefix(PREFIX))
    if matched is None:
        raise ConfigError(f"{spec!r} names no data set. Write hf:NAME, hf:NAME:SUBSET or hf:NAME:SUBSET@SPLIT.")
    try:
        from datasets import __version__, load_dataset
    except ImportError:  # a folder of this name is imported, too, and has neither
        raise missing_extra("hf", "datasets") from None
    if int(__version__.partition(".")[0]) < _FIRST_WITHOUT_CODE:
        raise ConfigError(
            f"datasets {__version__} may run code of a data set; install {_FIRST_WITHOUT_CODE}.0 or newer."
        )
    folder = Path(matched["name"]).expanduser()
    name = str(folder) if folder.is_dir() else matched["name"]
    try:
        found = load_dataset(name, matched["subset"], split=matched["split"] or "train")
    except Exception as error:  # the package has no kind of error in common
        raise ConfigError(f"{spec} cannot be loaded: {_words(error)}") from error
    _refuse_other_columns(spec, found.features)
    if not len(found):
        raise ConfigError(f"{spec} holds no rows.")
    return json.loads(json.dumps(found.to_list(), default=_text_of))


def _refuse_other_columns(spec: str, features: Any) -> None:
    """Raises ConfigError where a column holds pictures, sound or bytes: a task is a JSON value."""
    for column, kind in features.items():
        if (found := _unfit(kind)) is not None:
            raise ConfigError(
                f"{spec}: column {column!r} holds {found}, and a task is a JSON value. Load the data set in your "
                "script and give its other columns: fit(agent, rows.select_columns([…]))."
            )


def _unfit(kind: Any) -> str | None:
    """What a type of column holds that JSON does not, at any depth."""
    if isinstance(kind, Mapping):
        return next(filter(None, map(_unfit, kind.values())), None)
    if isinstance(kind, list):
        return _unfit(kind[0])
    if (inner := vars(kind).get("feature")) is not None:
        return _unfit(inner)
    held = vars(kind).get("dtype") or type(kind).__name__
    return str(held) if type(kind).__name__ in _DECODED or "binary" in str(held) else None


def _text_of(value: Any) -> str:
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return str(value)
    raise ConfigError(
        f"A row holds a {type(value).__name__}, and a task is a JSON value: {repr(value)[:100]}. Load the data set in "
        "your script, make a number or a text of it, and give the rows to fit."
    )


def _words(error: Exception) -> str:
    """What the package says, without the list of all that it tried."""
    words = " ".join(str(error).split())[:600] or type(error).__name__
    offline = (
        ". It was not downloaded before, and HF_HUB_OFFLINE forbids to do it now" if "OfflineMode" in words else ""
    )
    return f"{words}{offline}."
