"""Runs beside the one that is shown: each has a store of its own, so their curves and settings are read from the files
in their folders. Their rollouts are shown by `agl dashboard FOLDER`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError
from agentlightning.metrics import read_metrics
from agentlightning.metrics.jsonl import METRICS_FILE, RUN_FILE
from agentlightning.metrics.standing import is_alive, standing
from agentlightning.reading import read_object

MOST_LOOKED_AT = 2000
"""Entries of a folder."""


def neighbours(folder: Path | None) -> dict[str, dict[str, Any]]:
    """What is known of each run in a folder of runs, by its id; what cannot be read is no run."""
    found: dict[str, dict[str, Any]] = {}
    for place in _places(folder):
        run = _read(place)
        if run is not None:
            found[run["run_id"]] = run
    return found


def _places(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        return
    try:
        with os.scandir(folder) as entries:
            for _, entry in zip(range(MOST_LOOKED_AT), entries, strict=False):
                if entry.is_dir() and os.path.isfile(os.path.join(entry.path, RUN_FILE)):
                    yield Path(entry.path)
    except OSError:
        return


def _read(place: Path) -> dict[str, Any] | None:
    try:
        known = read_object(place / RUN_FILE)
        began = float(known.get("start_time") or (place / RUN_FILE).stat().st_mtime)
        rows = steps_of(place)
        status, error, going = known.get("status"), known.get("error"), is_alive(place)
        return {
            "run_id": str(known["run_id"]),
            "algorithm": str(known.get("algorithm") or ""),
            "agent": str(known.get("agent") or ""),
            "name": place.name,
            "status": status or ("running" if going else "ended"),
            "standing": standing(status, error, alive=going)._asdict(),
            "error": error,
            "start_time": began,
            "end_time": None if going or not rows else rows[-1].get("time"),
            "settings": dict(known.get("settings") or {}),
            "state": {"run_dir": str(place), "step": rows[-1].get("step") if rows else None},
            "elsewhere": str(place),
            "rows": rows,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None


def steps_of(place: Path) -> list[dict[str, Any]]:
    """The metrics of a run's steps; none where there are none yet."""
    file = place / METRICS_FILE
    try:
        seen = file.stat()
    except OSError:
        return []
    return _parsed(file, seen.st_mtime_ns, seen.st_size)


@functools.lru_cache(maxsize=256)
def _parsed(file: Path, _changed: int, _size: int) -> list[dict[str, Any]]:
    return read_metrics(file)
