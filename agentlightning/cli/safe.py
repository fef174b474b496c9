"""What models and agents said, on its way to a terminal: nothing in it may move a cursor, set a colour or turn letters.

Rich's markup is no concern here: such text is only ever shown as `Text`, or with `markup=False`.
"""

from __future__ import annotations

import unicodedata

from rich.console import Console

_KEPT = "\n\t"
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that change the direction in which the text after them is shown."""


def terminal() -> Console:
    """The terminal as wide as it is now. It colours nothing by itself."""
    return Console(highlight=False)


def safe(text: str) -> str:
    """The text with control characters and marks of direction written out: ESC becomes `\\x1b`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def one_line(text: str, most: int = 200) -> str:
    """The same on one line, cut where it is longer than `most` characters."""
    line = " ".join(safe(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _shown(character: str) -> str:
    if character in _KEPT:
        return character
    if character in _TURNS or unicodedata.category(character) in ("Cc", "Cs"):
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character
