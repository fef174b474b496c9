"""What the pages of runs, resources and workers show.

Neighbouring runs have stores of their own, so their curves and settings are read from the files in their folders; their
rollouts are shown by `agl dashboard FOLDER`.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request

from agentlightning.algorithm.catalogue import CATALOGUE
from agentlightning.dashboard.curves import Curve, curve_of, steps_of
from agentlightning.dashboard.texts import shown
from agentlightning.errors import ConfigError, NotFoundError, StoreError
from agentlightning.metrics import read_metrics
from agentlightning.metrics.sink import METRICS_FILE, RUN_FILE
from agentlightning.metrics.standing import is_alive, standing, standing_of
from agentlightning.reading import read_object
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Run, RunEventKind

MOST_RUNS = 500
MOST_EVENTS = 1000
SPARK_POINTS = 60
"""Of the small curve in the list."""
REPORTED: Sequence[RunEventKind] = ("note", "warning", "verdict", "event")
"""What is no step."""


async def listed(store: SqlLightningStore, request: Request) -> Any:
    """The latest runs, each with its last metrics and a small curve of rewards; and those in folders beside."""
    found = await store.query_runs(sort_by="start_time", sort_order="desc", limit=MOST_RUNS)
    curves = await request.app.state.curves.of(list(found))
    live = request.app.state.live
    here = [_in_list(_head(run, live), run.settings, curve) for run, curve in zip(found, curves, strict=True)]
    known = {run.run_id for run in found}
    in_folder = [run for run_id, run in (await _in_folder(request)).items() if run_id not in known]
    others = [_in_list(_head_in_folder(run), run["settings"], curve_of(run["rows"])) for run in in_folder]
    everything = sorted(here + others, key=lambda run: run["start_time"], reverse=True)
    return {"runs": everything[:MOST_RUNS], "total": found.total + len(others)}


async def _in_folder(request: Request) -> dict[str, dict[str, Any]]:
    return await asyncio.to_thread(neighbours, request.app.state.folder)


def _in_list(head: dict[str, Any], settings: Mapping[str, Any], curve: Curve) -> dict[str, Any]:
    stride = max(1, len(curve.rewards) // SPARK_POINTS)
    return {
        **head,
        "curve": curve.rewards[::stride],
        "validated": curve.validated,
        "reward": curve.rewards[-1][1] if curve.rewards else None,
        "steps_done": curve.last,
        "resumed": curve.began is not None and curve.began < head["start_time"],
        "model": settings.get("model"),
    }


def _head(run: Run, live: bool) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": name_of(run),
        "algorithm": run.algorithm,
        "agent": run.agent,
        "status": run.status,
        "standing": standing_of(run, alive=live)._asdict(),
        "error": run.error,
        "start_time": run.start_time,
        "end_time": run.end_time,
        "steps": run.settings.get("steps"),
        "state": shown(run.state),
        "elsewhere": None,
    }


def name_of(run: Run) -> str:
    """What people call the run: its folder; its id where it has none."""
    return Path(str(run.state.get("run_dir") or "")).name or run.run_id


def _head_in_folder(run: dict[str, Any]) -> dict[str, Any]:
    head = {name: value for name, value in run.items() if name not in ("rows", "settings")}
    return {**head, "steps": run["settings"].get("steps")}


async def one(store: SqlLightningStore, request: Request) -> Any:
    run_id = request.path_params["run_id"]
    run = await store.get_run_by_id(run_id)
    if run is not None:
        return {**_head(run, request.app.state.live), "settings": shown(run.settings)}
    if (found := (await _in_folder(request)).get(run_id)) is not None:
        return {**_head_in_folder(found), "settings": shown(found["settings"])}
    raise NotFoundError("There is no such run in this store. The list of runs shows those there are.")


async def steps(store: SqlLightningStore, request: Request) -> Any:
    """The metrics of each step from `from` on, and what there is to say of each metric."""
    run_id, first = request.path_params["run_id"], number(request, "from") or 0
    rows = await steps_of(store, run_id, first)
    run = await store.get_run_by_id(run_id)
    state: Mapping[str, Any] = {} if run is None else run.state
    if not rows and run is None:
        found = (await _in_folder(request)).get(run_id, {})
        rows, state = [row for row in found.get("rows", ()) if row["step"] >= first], found.get("state", {})
    return {"steps": rows, "metrics": CATALOGUE.with_own(state.get("own_metrics")).described(rows)}


async def diagnosis(store: SqlLightningStore, request: Request) -> Any:
    """What the doctor finds in a run: a verdict in words, and findings with the first thing to try."""
    run_id = request.query_params.get("run", "")
    run = await store.get_run_by_id(run_id)
    if run is None:
        raise NotFoundError("There is no such run in this store, so nothing can be said about it here.")
    return await request.app.state.diagnoses.of(run)


async def events(store: SqlLightningStore, request: Request) -> Any:
    """What the run said, the latest first; findings are events that have a severity."""
    found = await store.query_run_events(
        request.path_params["run_id"], kind_in=list(REPORTED), sort_order="desc", limit=MOST_EVENTS
    )
    rows = [{"kind": e.kind, "time": e.time, "step": e.step, "data": shown(e.data)} for e in found]
    return {"events": [row for row in rows if row["data"].get("text") != ""]}


async def resources(store: SqlLightningStore, request: Request) -> Any:
    found = await store.query_resources(sort_by="update_time", sort_order="desc", limit=200)
    return {
        "resources": [
            {
                "resources_id": update.resources_id,
                "version": update.version,
                "create_time": update.create_time,
                "update_time": update.update_time,
                "resources": shown({name: r.model_dump(mode="json") for name, r in update.resources.items()}),
            }
            for update in found
        ],
        "total": found.total,
    }


async def workers(store: SqlLightningStore, request: Request) -> Any:
    found = await store.query_workers(sort_by="worker_id", limit=1000)
    statistics = await store.statistics()
    return {
        "workers": [shown(worker.model_dump(mode="json")) for worker in found],
        "total": found.total,
        "rollouts": statistics["rollouts"],
        "attempts": statistics["attempts"],
        "spans": statistics["total_spans"],
        "calls": statistics["total_calls"],
    }


def number(request: Request, name: str) -> int | None:
    """A whole number of the query. Raises `StoreError` for anything else."""
    text = request.query_params.get(name, "")
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise StoreError(f"'{name}' must be a whole number, not {text[:40]!r}.") from None


_MOST_LOOKED_AT = 2000
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
            for _, entry in zip(range(_MOST_LOOKED_AT), entries, strict=False):
                if entry.is_dir() and os.path.isfile(os.path.join(entry.path, RUN_FILE)):
                    yield Path(entry.path)
    except OSError:
        return


def _read(place: Path) -> dict[str, Any] | None:
    try:
        known = read_object(place / RUN_FILE)
        began = float(known.get("start_time") or (place / RUN_FILE).stat().st_mtime)
        rows = _steps_in(place)
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
            "state": {
                "run_dir": str(place),
                "step": rows[-1].get("step") if rows else None,
                "own_metrics": known.get("own_metrics"),
            },
            "elsewhere": str(place),
            "rows": rows,
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None


def _steps_in(place: Path) -> list[dict[str, Any]]:
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
