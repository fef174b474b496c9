"""All that this package prints goes through here: what others wrote is on its way to a terminal.

Models, agents, tasks, paths and servers write what they like. Nothing of it may move a cursor, set a colour, reach a
clipboard or turn letters, and no attempt's key is shown whole. `Console` sees to that for whatever it prints, and
`SafeFormatter` for what is logged; `TerminalLog` shows no more of that than people read.
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import IO, Any

import rich.console
from rich.segment import Segment

from agentlightning.errors import kind_of
from agentlightning.keys import redacted

_KEPT = "\n\t"
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Marks that change the direction in which the text after them is shown."""


class Console(rich.console.Console):
    """Rich's, for texts that others wrote. What it adds itself, colours and moves of the cursor, stays."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(emoji=False, **settings)  # `:fire:` in a path or an answer is what somebody wrote

    @property
    def file(self) -> IO[str]:
        """Where it writes: nowhere, once somebody has closed the stream, such as an agent its standard output."""
        found = rich.console.Console.file.__get__(self)
        return io.StringIO() if getattr(found, "closed", False) else found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(encodable(safe(segment.text), self.encoding), segment.style)

    def render_str(self, text: str, **options: Any) -> Any:
        return super().render_str(redacted(text), **options)  # before a key is broken into lines

    def print_json(self, json: str | None = None, *, data: Any = None, **_: Any) -> None:
        """JSON that programs read back as what it was, but for keys."""
        self.out(safe_json(json if json is not None else _dumped(data)), highlight=False)

    def show_key(self, before: str, key: str, after: str) -> None:
        """A line with the key of a server that this user starts, whole: here is where it is given out."""
        self.file.write(f"{before} {key} ({after})\n")
        self.file.flush()


class SafeFormatter(logging.Formatter):
    """What is logged, with texts of others written out."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


class TerminalLog(logging.StreamHandler[Any]):
    """What is logged, on the standard error, for people to read.

    An outage is met by every attempt of a run: of one place's lines `SHOWN` are shown in `SECONDS`. The next line from
    there after that time says how many there were in between. Where it is no terminal, as in a service whose output
    somebody collects, all are written, unless they are `kept` in a file anyway.
    """

    SHOWN, SECONDS, PLACES = 3, 60.0, 1000

    def __init__(self, *, kept: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._kept = kept
        self.setFormatter(SafeFormatter("%(levelname)s %(name)s: %(message)s"))
        self._clock = clock
        self._places: dict[tuple[str, str], tuple[float, int]] = {}
        """Of a logger and its words before they are filled in: since when they are counted, and how often they came."""

    def emit(self, record: logging.LogRecord) -> None:
        if not (self._kept or (not self.stream.closed and self.stream.isatty())):
            super().emit(record)
            return
        ours = record.name.startswith("agentlightning")
        words = str(record.msg) if ours and record.msg != "%s" else record.getMessage()
        words = words if ours else kind_of(words)  # others fill them in before
        place, now = (record.name, words), self._clock()
        since, count = self._places.pop(place, (now, 0))
        if now - since > self.SECONDS:
            if count > self.SHOWN:
                self._note(record, f"{count - self.SHOWN} lines like the next one were left out here.")
            since, count = now, 0
        while len(self._places) >= self.PLACES:
            self._places.pop(next(iter(self._places)))
        self._places[place] = since, count + 1
        if count < self.SHOWN:
            super().emit(record)
        elif count == self.SHOWN:
            self._note(record, f"More lines like the last {self.SHOWN} are left out here for {self.SECONDS:g} s.")

    def _note(self, about: logging.LogRecord, words: str) -> None:
        super().emit(logging.LogRecord(about.name, about.levelno, about.pathname, about.lineno, words, (), None))


def terminal(*, stderr: bool = False) -> Console:
    """The terminal as wide as it is now. It colours nothing by itself."""
    return Console(highlight=False, stderr=stderr)


def safe(text: str) -> str:
    """The text with control characters and marks of direction written out, ESC as `\\x1b`, and with keys shortened."""
    text = redacted(text)
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def fitting_table(rows: Sequence[Mapping[str, Any]], console: rich.console.Console) -> Any:
    """The table with as many columns, from the left, as the screen is wide: what is in it can be pasted."""
    from rich.measure import Measurement
    from rich.table import Table

    titles = list(rows[0])
    while True:
        table = Table(*titles, box=None, padding=(0, 2, 0, 0))
        for column in table.columns:
            column.no_wrap, column.overflow = True, "ignore"
        for row in rows:
            table.add_row(*[row[title] for title in titles])
        width = Measurement.get(console, console.options.update(max_width=10_000), table).maximum
        if width <= console.width or len(titles) == 1:
            table.min_width = width
            return table
        titles.pop()


_PLAIN = str.maketrans(
    {"→": ">", "…": ".", "×": "x", "–": "-", "—": "-", "✗": "x", "·": ".", "≤": "<", "≥": ">", "±": "+"}
)
"""Signs of our own, each with one that every encoding has and that is as wide."""


def encodable(text: str, encoding: str) -> str:
    """The text with signs that `encoding` has: of a terminal, or of a file on Windows, which has no arrows."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_PLAIN).encode(encoding, "replace").decode(encoding)
    except LookupError:  # an encoding that Python does not know
        return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
    return text


def never_fail_to_print() -> None:
    """Let what `print` and Typer's help write be replaced, too, where the terminal's encoding lacks a sign."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def safe_json(text: str) -> str:
    """JSON, indented, with such characters as JSON writes them."""
    shown = json.dumps(json.loads(redacted(text)), indent=2, ensure_ascii=False)
    return "".join(f"\\u{ord(c):04x}" if c != "\n" and _unsafe(c) else c for c in shown)


def one_line(text: str, most: int = 200) -> str:
    """The same on one line, cut where it is longer than `most` characters."""
    line = " ".join(safe(text).split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _dumped(data: Any) -> str:
    return json.dumps(data)


def _unsafe(character: str) -> bool:
    return character in _TURNS or unicodedata.category(character) in ("Cc", "Cs")


def _shown(character: str) -> str:
    if character in _KEPT or not _unsafe(character):
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
