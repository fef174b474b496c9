"""Opening a run to look at it: its store, its row, and for runs of before there were rows, what its folder holds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from agentlightning.cli.store import location_of
from agentlightning.doctor import Evidence, find_run, gather
from agentlightning.doctor.evidence import learned_steps
from agentlightning.errors import ConfigError
from agentlightning.metrics import read_metrics
from agentlightning.metrics.standing import Standing, is_alive, standing_of
from agentlightning.reading import read_object
from agentlightning.store.base import LightningStore
from agentlightning.trainer.folder import METRICS_FILE
from agentlightning.trainer.live import RUN_FILE
from agentlightning.types import Run


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run and where it is."""

    store: LightningStore
    run: Run | None
    """None in a store without runs."""
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name or str(self.folder.resolve().name)

    @property
    def standing(self) -> Standing:
        """How the run stands, in the words of `agl runs` and the dashboard."""
        return Standing("ended") if self.run is None else standing_of(self.run, alive=is_alive(self.folder))

    @property
    def settings(self) -> dict[str, Any]:
        return self.run.settings if self.run is not None else described(self.folder).get("settings", {})

    async def steps(self) -> list[dict[str, Any]]:
        """Metrics of its learned steps, in order."""
        if self.run is not None:
            return await learned_steps(self.store, self.run.run_id)
        return [m for m in rows(self.folder) if m.get("step")]

    async def evidence(self) -> Evidence:
        """What the doctor looks at."""
        found = await gather(self.store, self.run)
        return found if self.run is not None else replace(found, steps=await self.steps(), settings=self.settings)


def check_order(run: Path, rollout: str | None) -> None:
    """Raises ConfigError where the two stand in each other's place."""
    if rollout is not None and not run.exists() and Path(rollout).exists():
        raise ConfigError(f"The run comes first, and the rollout behind it: {quote(rollout)} {run}")


@asynccontextmanager
async def opened_run(path: Path, run_id: str | None = None) -> AsyncIterator[OpenedRun]:
    """A run's folder or a store's file, also of a run that goes on. Without an id it is the last run in the store.

    Raises ConfigError where there is none.
    """
    where = location_of(path)
    folder = where.path.parent if where.path is not None else path
    async with where.reading() as store:
        yield OpenedRun(store, await find_run(store, run_id), folder)


def described(folder: Path) -> dict[str, Any]:
    """What `run.json` says; nothing where there is none that can be read."""
    try:
        found = read_object(folder / RUN_FILE)
    except (OSError, ValueError):
        return {}
    return found | {name: {} for name in ("settings", "environment") if not isinstance(found.get(name, {}), dict)}


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none where there is no such file."""
    file = folder / METRICS_FILE
    return read_metrics(file) if file.is_file() else []
