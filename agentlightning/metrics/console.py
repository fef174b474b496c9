"""Runs on the screen: in a terminal a table that grows by a row per step and a line with what is going on right now; in
a notebook a curve that grows by a point per step, with the same line below it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from agentlightning.metrics.sink import Columns, Sink
from agentlightning.metrics.svg import curve_svg, points_of

Console = Sink
"""Shows a run to a person: any sink can."""


def default_console() -> Sink:
    """A curve where code runs in a notebook, else rows in the terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return RichConsole()
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return NotebookConsole(lambda html: handle.update(HTML(html)))


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
    """The step, of how many, and how long the rest will take."""
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


_LAST = 6
"""How many notes and warnings stay visible."""


class NotebookConsole(Sink):
    """Draws the run by `show(html)`, which replaces what was shown before. All texts are escaped."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._steps: list[dict[str, Any]] = []
        self._lines: list[tuple[str, str]] = []
        self._status = ""

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._steps.append(dict(metrics))
        self._draw()

    def status(self, text: str) -> None:
        self._status = text
        self._draw()

    def note(self, text: str) -> None:
        self._say("", text)

    def warn(self, text: str) -> None:
        self._say("color:#b23a48", text)

    def close(self) -> None:
        self._status = ""
        self._draw()

    def _say(self, style: str, text: str) -> None:
        if text.strip():
            self._lines = [*self._lines, (style, text)][-_LAST:]
            self._draw()

    def _draw(self) -> None:
        self._show(self.html())

    def html(self) -> str:
        """The HTML that the cell shows now: curves, status and messages."""
        curves = {"training": points_of(self._steps, "reward"), "validation": points_of(self._steps, "val_reward")}
        lines = [f"<div style='{style};white-space:pre-wrap'>{escape(text)}</div>" for style, text in self._lines]
        return f"<div>{curve_svg(curves, 'reward')}<div><i>{escape(self._status)}</i></div>{''.join(lines)}</div>"
