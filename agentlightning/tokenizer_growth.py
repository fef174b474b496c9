"""Tokenizers that make texts longer without end. Whoever wrote a `tokenizer.json` may have it replace each letter by a
million, so that a short text takes all memory. Such a file is refused before it is loaded: loading it runs its steps.
"""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.errors import ModelError
from agentlightning.reading import read_text

_MOST_GROWTH = 1_000
"""Times as long as a text may become: real tokenizers stay far below."""
_MOST_CHARACTERS = 10_000
"""Of one token. Real vocabularies have some of a thousand spaces."""
_MOST_BYTES = 2**28
"""The largest file that is read: those of models with a million tokens have some 60 MB."""
_GIVEN = ("content", "prepend", "replacement")
"""Keys of the texts that a step puts in."""


class _Model(msgspec.Struct):
    vocab: Any = None


class _File(msgspec.Struct):
    """What of a `tokenizer.json` decides how long texts become."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None
    post_processor: Any = None
    added_tokens: list[Any] | None = None
    model: _Model | None = None


def refuse_growth(directory: Path) -> None:
    """Raises ModelError where the `tokenizer.json` in a directory, if there is one, lets texts grow out of bounds."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    try:
        found = msgspec.json.decode(read_text(file, _MOST_BYTES), type=_File)
        steps = ("normalizer", "pre_tokenizer", "decoder", "post_processor")
        growth = {name: _growth(getattr(found, name)) for name in steps}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}. Get the model's file again.") from error
    tokens = {"added_tokens": max(map(_growth, found.added_tokens or ()), default=1)}
    tokens["vocab"] = _longest(found.model.vocab if found.model is not None else None)
    for name, times in (growth | tokens).items():
        if times > (most := _MOST_CHARACTERS if name in tokens else _MOST_GROWTH):
            raise ModelError(
                f"{file} is refused: its {name} may make a text more than {most:,} times as long, which can "
                "take all memory. Take the tokenizer.json of the model that it came from."
            )


def _growth(part: Any) -> float:
    """How many times as long a text may become by a part of a tokenizer. Steps one after another multiply."""
    if isinstance(part, list):  # of steps; of pieces of a template, in which texts stand; or of the ids of a piece
        pieces = sum(isinstance(one, dict) and "Sequence" in one for one in part)
        numbers = sum(isinstance(one, int) for one in part)
        return max(pieces, numbers, 1) * math.prod(map(_growth, part), start=1.0)
    if not isinstance(part, dict):
        return 1
    inner = math.prod((_growth(one) for one in part.values()), start=1.0)
    return max(_own(part), _mapped(part.get("precompiled_charsmap")), 1) * inner


def _own(step: dict[str, Any]) -> float:
    """How many times as long a text becomes by a step itself."""
    given = max((len(step[key]) for key in _GIVEN if isinstance(step.get(key), str)), default=0)
    pattern = step.get("pattern")
    if not given or not isinstance(pattern, dict):
        return given
    fixed = pattern.get("String")  # an expression may also find nothing, between any two characters
    return given / len(fixed) if isinstance(fixed, str) and fixed else given + 1


def _mapped(table: Any) -> int:
    """The longest text in SentencePiece's table of characters: the size of an index, the index, and texts."""
    if not isinstance(table, str):
        return 1
    blob = base64.b64decode(table)
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _longest(vocab: Any) -> int:
    """Characters of the longest token."""
    tokens = vocab if isinstance(vocab, dict) else [one[0] for one in vocab or () if isinstance(one, list) and one]
    return max((len(token) for token in tokens if isinstance(token, str)), default=0)
