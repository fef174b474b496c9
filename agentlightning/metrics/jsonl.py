"""`metrics.jsonl`: one line per step, always written; a resumed run goes on in the same file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write
from agentlightning.metrics.sink import Sink

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
"""What the run is, beside them in its folder."""


class JsonlSink(Sink):
    """Appends a line per step. Opening it to resume before step n drops the lines of steps from n on."""

    def __init__(self, path: Path, first_step: int = 0) -> None:
        self.path = path
        kept = [m for m in read_metrics(path) if m["step"] < first_step] if path.exists() else []
        atomic_write(path, "".join(json.dumps(m) + "\n" for m in kept))
        self._file = path.open("a", encoding="utf-8")

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(metrics) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Reads all complete lines of a metrics file. An unfinished last line is skipped.

    Raises ConfigError for a line that is no step, as a file that was edited or cut in the middle has one.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return [_row(line, path, number) for number, line in enumerate(lines, 1)]


def _row(line: str, path: Path, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict) or "step" not in row:
        raise ConfigError(f"{path} is damaged: line {number} is no step. Delete that line; the others can be read.")
    return row
