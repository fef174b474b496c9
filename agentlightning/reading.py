"""Reading files that others may have written: run folders, models, tasks and traces that were copied from elsewhere.

A file is read only if it is a regular one, so that a named pipe or a device holds nobody up, and only up to a size, so
that an empty file of a terabyte takes no memory. Whatever is wrong with one is an OSError or a ValueError.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

MOST_BYTES = 2**26
"""Of a file with settings or descriptions; what grows with a run or a data set is given more."""
_PART = 2**20
_DIGITS = 300
"""So many of an integer fit into a float; what is longer is infinite."""
_MOST_DIGITS = 19
_PARTS = 300
"""Of a key of TOML: what reads it takes time with their square."""

_MOST_VALUES = 10**7
"""And characters of texts."""


def read_text(path: Path, most: int = MOST_BYTES, *, encoding: str = "utf-8") -> str:
    """The text of a file. Raises OSError for what cannot be read or is no regular file, and ValueError for more than
    `most` bytes and for what is no text."""
    with os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        seen = os.fstat(file.fileno())
        if not stat.S_ISREG(seen.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if seen.st_size > most:
            raise ValueError(f"it has {seen.st_size:,} bytes, and more than {most:,} are not read")
        parts = iter(partial(file.read, _PART), b"")  # to read `most` at once takes memory for `most`
        return b"".join(islice(parts, most // _PART + 1))[:most].decode(encoding)


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """The value of a file of JSON. Raises OSError and ValueError as `read_text` and `parsed_json` do."""
    return parsed_json(read_text(path, most))


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """The object of a file of JSON. Raises OSError, and ValueError also for another value."""
    found = read_json(path, most)
    if not isinstance(found, dict):
        raise ValueError(f"it holds {type(found).__name__} and no object")
    return found


def whole_number(text: str) -> int | None:
    """The number that a text of digits is; None for every other text, also for digits of other scripts, and for more
    of them than 64 bits hold: of thousands `int` makes an error."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def parsed_json(text: str) -> Any:
    """The value of a text of JSON. Raises ValueError, also where it is nested too deeply to be read."""
    with within_depth():
        return json.loads(text, parse_int=_number)


def parsed_toml(text: str) -> dict[str, Any]:
    """The table of a text of TOML. Raises ValueError, also where it is nested too deeply to be read."""
    if any(_is_long_key(part) for part in re.split(r"[=\n{,]", text)):
        raise ValueError(f"a key has more than {_PARTS} parts")
    with within_depth():
        return tomllib.loads(text)


@contextmanager
def within_depth() -> Iterator[None]:
    """Raises ValueError where what is read within the block is nested too deeply."""
    try:
        yield
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def within_size(value: Any) -> Any:
    """The value. Raises ValueError where it holds more than a file could: YAML may name one part many times, and each
    of those again."""
    waiting, found = [value], 0
    while waiting:
        one = waiting.pop()
        found += 1 + len(one) if isinstance(one, str) else 1
        if found > _MOST_VALUES:
            raise ValueError("its parts name each other too often (&name, *name). Write them out")
        waiting.extend([*one, *one.values()] if isinstance(one, dict) else one if isinstance(one, list) else ())
    return value


def _is_long_key(text: str) -> bool:
    """Whether a text may be such a key: prose has words between its dots, and dots in a row have nothing."""
    parts = [part.strip(" \t[]") for part in text.split(".")] if text.count(".") > _PARTS else []
    return bool(parts) and all(part and (" " not in part or part[0] in "\"'") for part in parts)


def _number(text: str) -> float:
    return int(text) if len(text) <= _DIGITS else float(text)
