"""The terminal: a table that grows by a row per step, and a line that says what is going on right now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentlightning.metrics.sink import Columns, Sink

Console = Sink
"""What shows a run to a person: any sink."""


class SilentConsole(Sink):
    """Says nothing; for programs that read the metrics file."""


class RichConsole(Sink):
    """Rows as aligned text, so that a log file reads like the screen; the status line only where a person looks."""

    def __init__(self) -> None:
        from agentlightning.console import Console as Terminal

        self._terminal = Terminal(highlight=False, soft_wrap=True)
        self._spinner = self._terminal.status("") if self._terminal.is_terminal else None
        self._columns: Columns = ()
        self._header_due = True

    def columns(self, columns: Columns) -> None:
        self._columns = columns
        self._header_due = True

    def step(self, metrics: Mapping[str, Any]) -> None:
        if self._header_due:
            titles = "  ".join(title.rjust(_width(title)) for _, title, _ in self._columns)
            self._terminal.print(f"[bold]{titles}[/bold]")
            self._header_due = False
        shown = {**metrics, **_progress(metrics)}
        cells = [_cell(shown.get(name), form).rjust(_width(title)) for name, title, form in self._columns]
        self._terminal.print("  ".join(cells).rstrip())

    def status(self, text: str) -> None:
        if self._spinner is not None:
            self._spinner.update(text)
            self._spinner.start()

    def note(self, text: str) -> None:
        self._terminal.print(text, markup=False)

    def warn(self, text: str) -> None:
        self._terminal.print(f"! {text}", style="yellow", markup=False)

    def close(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()


def _progress(metrics: Mapping[str, Any]) -> dict[str, str]:
    """Which step of how many it was, and how long the rest will take."""
    step, steps, left = (metrics.get(name) for name in ("step", "steps", "seconds_left"))
    progress = {} if step is None else {"progress": f"{step}" if steps is None else f"{step}/{steps}"}
    return progress if not left else {**progress, "left": _duration(left)}


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _width(title: str) -> int:
    return max(len(title), 6)


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
