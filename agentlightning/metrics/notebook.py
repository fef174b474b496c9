"""A run in a notebook: a curve that grows by a point per step, with what is going on below it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from agentlightning.metrics.console import RichConsole
from agentlightning.metrics.sink import Sink
from agentlightning.metrics.svg import curve_svg, points_of

LAST = 6
"""Notes and warnings that stay visible."""


class NotebookConsole(Sink):
    """`show(html)` replaces what is shown. Everything said is escaped."""

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
            self._lines = [*self._lines, (style, text)][-LAST:]
            self._draw()

    def _draw(self) -> None:
        self._show(self.html())

    def html(self) -> str:
        """The HTML that the cell shows now: curves, status and messages."""
        curves = {"training": points_of(self._steps, "reward"), "validation": points_of(self._steps, "val_reward")}
        lines = [f"<div style='{style};white-space:pre-wrap'>{escape(text)}</div>" for style, text in self._lines]
        return f"<div>{curve_svg(curves, 'reward')}<div><i>{escape(self._status)}</i></div>{''.join(lines)}</div>"


def default_console() -> Sink:
    """A curve where code runs in a notebook, else rows in the terminal."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell":
        return RichConsole()
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return NotebookConsole(lambda html: handle.update(HTML(html)))
