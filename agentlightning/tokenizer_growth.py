"""Tokenizers that make texts longer without end, or take minutes for a line. Whoever wrote a `tokenizer.json` may have
it replace each letter by a million, so that a short text takes all memory. Such a file is refused before it is loaded:
loading it runs its steps. One with an expression of exponential time is refused by trying it: the library has a limit
on each match, beyond which it panics, but none on all of them.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
_TRIED = "aA1 \n!é中"
_MOST_TRIED = 100
"""Characters of the file's own expressions that are tried, too."""
_LENGTHS = (16, 32, 64, 128, 256)
"""Each twice the one before, so that a slow expression is found before it takes long."""
_SECONDS = 0.25
"""Of processor time for one such text. Real tokenizers take less than a thousandth of it."""
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


def refuse_growth(directory: Path) -> str:
    """The characters to give to `refuse_slowness`. Raises ModelError where the `tokenizer.json` in a directory, if any,
    lets texts grow out of bounds."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _TRIED
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
    own = dict.fromkeys(char for name in steps for text in _expressions(getattr(found, name)) for char in text)
    return _TRIED + "".join([*own][:_MOST_TRIED])


def refuse_slowness(run: Callable[[str], object], characters: str, file: Path) -> None:
    """Raises ModelError where a tokenizer takes long for a few hundred times the same character. `run` encodes a text
    and decodes what it got."""
    for length in _LENGTHS:
        for one in dict.fromkeys(characters):
            began = time.thread_time()
            run(one * length + " !x1\n")
            if time.thread_time() - began > _SECONDS:
                raise ModelError(
                    f"{file} is refused: it takes more than {_SECONDS:g} s for {length} times {one!r}, so longer texts "
                    "would take hours. Take the tokenizer.json of the model that it came from."
                )


@contextmanager
def panics_named(file: Path) -> Iterator[None]:
    """Raises ModelError where the library fails in the block over what a tokenizer's file says. It has no kind of its
    own for that: a plain Exception, or a panic, which is none and would end who catches those."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise ModelError(f"{file} cannot be used: {error}. Get the model's file again.") from None


def token_ids(value: Any, what: str) -> list[int]:
    """The ids in a model's file, which has one or a list of them. Raises ModelError for what is none."""
    found: list[Any] = value if isinstance(value, list) else [value]
    if odd := [one for one in found if type(one) is not int or not 0 <= one < 2**31]:
        raise ModelError(
            f"{what} has {str(odd[0])[:40]!r}, which is no token's id. Write the ids of its end tokens there."
        )
    return found


def _expressions(part: Any) -> Iterator[str]:
    """The regular expressions in a part of a tokenizer."""
    if isinstance(part, dict) and isinstance(part.get("Regex"), str):
        yield part["Regex"]
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from _expressions(one)


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
