"""A sink: where what a run measures and says goes. The seam for dashboards and trackers: override what you want to see.

    class MySink(Sink):
        def step(self, metrics):
            my_tracker.log(metrics)

    Trainer(sinks=[MySink()])

Methods are called in the order things happen, one at a time, and should return soon: the training loop waits. The
`Reporter` is what an algorithm sends its measurements and messages to, and hands them to all sinks. `JsonlSink` writes
`metrics.jsonl`, a line per step, for every run; a resumed run goes on in the same file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentlightning.arguments import nearest
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, open_private, reason_of_file
from agentlightning.metrics.catalogue import METRICS
from agentlightning.reading import parsed_json, read_text
from agentlightning.types import Run

logger = logging.getLogger(__name__)

Columns = Sequence[tuple[str, str, str]]
"""Metric, title and format of each column of a table."""


class MetricRow(dict[str, Any]):
    """A step's metrics, which says what they are called where one is asked for by another name."""

    of_others: Collection[str] = ()
    """The metrics that any step has."""

    def __missing__(self, name: str) -> Any:
        if name in self.of_others:
            raise KeyError(f"{name}. This step has none, and others do: row.get({name!r}) is None where there is none.")
        wanted = re.sub("accuracy|acc|score|return", "reward", re.sub("^(mean|avg|average|train|final)_", "", name))
        meant = nearest(wanted, self.of_others or self)
        hint = f"Did you mean {meant}?" if meant else f"The row has {', '.join(self)}."
        raise KeyError(f"{name}. {hint}")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"A row of metrics is a dict: row[{name!r}].", name=name, obj=self)


class Sink:
    """A base class whose methods do nothing."""

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


class Reporter(Sink):
    """Hands everything to each of its sinks, in their order.

    `guests` are the user's own sinks: one that raises is reported and hears no more, and the run goes on.
    """

    def __init__(self, *sinks: Sink, guests: Sequence[Sink] = ()) -> None:
        self._sinks = sinks
        self._guests = list(guests)
        self._gauges: Callable[[], Mapping[str, Any]] = dict

    def measure_too(self, gauges: Callable[[], Mapping[str, Any]]) -> None:
        """Add these metrics to every step, whatever the algorithm reports."""
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
        whole = MetricRow({**metrics, **self._gauges()})
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


METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
"""The file beside the metrics that describes the run."""


class JsonlSink(Sink):
    """Appends a line per step. Opening it to resume before step n drops the lines of steps from n on."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self.path = path
        kept = [m for m in read_metrics(path) if m["step"] < first_step] if path.exists() else []
        atomic_write(path, "".join(json.dumps(m) + "\n" for m in kept))
        self._file = open_private(path, "a", encoding="utf-8")

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


_MOST_BYTES = 2**29
"""The largest metrics file that is read."""
_LISTS_AND_TEXTS = ("tasks", "groups", "outcomes", "note")
"""Metrics that are not numbers."""
_MOST_BITS = 1000
"""Of an integer that can be a float."""
_NUMBERS = frozenset(metric.name for metric in METRICS) - {*_LISTS_AND_TEXTS}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads all complete lines of a metrics file. An unfinished last line is skipped. Raises ConfigError, with the
    line, for a file that no run writes: it was damaged, or somebody else wrote it."""
    try:
        lines = read_text(path, _MOST_BYTES).split("\n")[:-1]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of_file(error)}.") from None
    return [metrics_row(line, f"{path} is damaged: line {number}") for number, line in enumerate(lines, 1)]


def metrics_row(line: str, where: str) -> dict[str, Any]:
    """The metrics of a step. Raises ConfigError, which says where, for a line that no run writes."""
    try:
        return checked_row(parsed_json(line))
    except ValueError as error:
        raise ConfigError(f"{where} is no step: {error}. Delete that line; the others can be read.") from None


def checked_row(row: Any) -> dict[str, Any]:
    """The metrics of a step as a file or a store has them. Raises ValueError for what no run writes."""
    if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not 0 <= row["step"] < 2**53:
        raise ValueError("it is no object with the number of a step")
    for name, value in row.items():
        if (name in _NUMBERS or "/" in name) and not isinstance(value, int | float | None):
            raise ValueError(f"{name[:60]!r} is no number")
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise ValueError(f"{name[:60]!r} is larger than numbers are")
    return row
