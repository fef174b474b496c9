"""`metrics.jsonl`: one line per step, always written; a resumed run goes on in the same file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, open_private, reason_of_file
from agentlightning.metrics.catalogue import METRICS
from agentlightning.metrics.sink import Sink
from agentlightning.reading import parsed_json, read_text

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
"""What the run is, beside them in its folder."""


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


_BYTES = 2**29
"""Of a metrics file."""
_LISTS_AND_TEXTS = ("tasks", "groups", "outcomes", "note")
"""Metrics that are no numbers."""
_NUMBERS = frozenset(metric.name for metric in METRICS) - {*_LISTS_AND_TEXTS}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads all complete lines of a metrics file. An unfinished last line is skipped. Raises ConfigError, with the
    line, for a file that no run writes: it was damaged, or somebody else wrote it."""
    try:
        lines = read_text(path, _BYTES).split("\n")[:-1]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of_file(error)}.") from None
    return [metrics_row(line, f"{path} is damaged: line {number}") for number, line in enumerate(lines, 1)]


def metrics_row(line: str, where: str) -> dict[str, Any]:
    """The metrics of a step. Raises ConfigError, which says where, for a line that no run writes."""
    try:
        row = parsed_json(line)
        if not isinstance(row, dict) or not isinstance(row.get("step"), int) or not 0 <= row["step"] < 2**53:
            raise ValueError("it is no object with the number of a step")
        for name, value in row.items():
            if (name in _NUMBERS or "/" in name) and not isinstance(value, int | float | None):
                raise ValueError(f"{name[:60]!r} is no number")
    except ValueError as error:
        raise ConfigError(f"{where} is no step: {error}. Delete that line; the others can be read.") from None
    return row
