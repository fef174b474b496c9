"""The reporter: where an algorithm sends what it measures and what it has to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.metrics.console import Console
from agentlightning.metrics.jsonl import JsonlSink


class Reporter:
    """Hands each step's metrics to the file and the terminal, and messages to the terminal."""

    def __init__(self, file: JsonlSink, console: Console) -> None:
        self._file = file
        self._console = console

    def columns(self, columns: Sequence[tuple[str, str, str]]) -> None:
        """The table's columns: metric, title, format."""
        self._console.columns(columns)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """The metrics of a finished step; `step` is one of them."""
        self._file.log(metrics)
        self._console.row(metrics)

    def status(self, text: str) -> None:
        """What is going on right now; replaced by the next one."""
        self._console.status(text)

    def note(self, text: str) -> None:
        """Something to keep on the screen."""
        self._console.note(text)

    def warn(self, text: str) -> None:
        """Something the user should act on."""
        self._console.warn(text)

    def close(self) -> None:
        self._console.close()
        self._file.close()
