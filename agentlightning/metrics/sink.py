"""A sink: where what a run measures and says goes. The seam for dashboards and trackers: override what you want to see.

    class MySink(Sink):
        def step(self, metrics):
            my_tracker.log(metrics)

    Trainer(sinks=[MySink()])

Methods are called in the order things happen, one at a time, and should return soon: the training loop waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.types import Run

Columns = Sequence[tuple[str, str, str]]
"""Metric, title and format of each column of a table."""


class Sink:
    """Does nothing with anything; a base class and a null object."""

    def start(self, run: Run) -> None:
        """The run begins, or goes on after it was resumed."""

    def columns(self, columns: Columns) -> None:
        """The columns that a table of this run shows for each step."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """The metrics of a finished step; `step` is one of them."""

    def status(self, text: str) -> None:
        """A short text about what the run does right now; the next one replaces it."""

    def note(self, text: str) -> None:
        """A message about the run that needs no action."""

    def warn(self, text: str) -> None:
        """Something the user should act on."""

    def verdict(self, text: str) -> None:
        """The conclusion about the run in words: solved, stuck, not learning. By default it is a warning."""
        self.warn(text)

    def event(self, name: str, data: Mapping[str, Any]) -> None:
        """Something else that happened: a checkpoint, a restart."""

    def close(self) -> None:
        """The run is over; nothing comes after this."""
