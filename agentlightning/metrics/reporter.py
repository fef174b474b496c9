"""The reporter: where an algorithm sends what it measures and what it has to say. It hands all of it to the sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentlightning.metrics.sink import Columns, Sink
from agentlightning.types import Run

logger = logging.getLogger(__name__)


class Reporter(Sink):
    """Hands everything to each of its sinks, in their order.

    `guests` are the user's own sinks: one that raises is reported and hears no more, and the run goes on.
    """

    def __init__(self, *sinks: Sink, guests: Sequence[Sink] = ()) -> None:
        self._sinks = sinks
        self._guests = list(guests)
        self._gauges: Callable[[], Mapping[str, Any]] = dict

    def measure_too(self, gauges: Callable[[], Mapping[str, Any]]) -> None:
        """Read these with every step, whatever the algorithm reports."""
        self._gauges = gauges

    def _tell(self, what: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            what(sink)
        for guest in list(self._guests):
            try:
                what(guest)
            except Exception:  # a tracker that is down is no reason to stop training
                self._guests.remove(guest)
                logger.exception("The sink %s failed, and gets nothing more.", type(guest).__name__)

    def start(self, run: Run) -> None:
        self._tell(lambda sink: sink.start(run))

    def columns(self, columns: Columns) -> None:
        self._tell(lambda sink: sink.columns(columns))

    def step(self, metrics: Mapping[str, Any]) -> None:
        whole = {**metrics, **self._gauges()}
        self._tell(lambda sink: sink.step(whole))

    def status(self, text: str) -> None:
        self._tell(lambda sink: sink.status(text))

    def note(self, text: str) -> None:
        self._tell(lambda sink: sink.note(text))

    def warn(self, text: str) -> None:
        self._tell(lambda sink: sink.warn(text))

    def verdict(self, text: str) -> None:
        self._tell(lambda sink: sink.verdict(text))

    def event(self, name: str, data: Mapping[str, Any]) -> None:
        self._tell(lambda sink: sink.event(name, data))

    def close(self) -> None:
        self._tell(lambda sink: sink.close())
