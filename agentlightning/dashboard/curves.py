"""The small curves in the list of runs: each step is read once, also of a run that goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Run

MOST_STEPS = 20_000
Point = tuple[int, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """What the list shows of a run's steps."""

    rewards: Sequence[Point] = ()
    validated: Sequence[Point] = ()
    last: int | None = None
    """The last step that was learned."""
    began: float | None = None
    """When the first step ended: before the run's start where it was resumed."""


class Curves:
    """Of the runs of one store that were listed last."""

    def __init__(self, store: SqlLightningStore) -> None:
        self._store = store
        self._kept: dict[str, tuple[object, Curve]] = {}

    async def of(self, runs: Sequence[Run]) -> list[Curve]:
        """The curve of each."""
        found = {run.run_id: await self._one(run) for run in runs}
        self._kept = found
        return [curve for _, curve in found.values()]

    async def _one(self, run: Run) -> tuple[object, Curve]:
        step = run.state.get("step")
        state = (run.status, run.end_time, step)
        before, curve = self._kept.get(run.run_id, (None, Curve()))
        if before == state:
            return state, curve
        if curve.last is None or not isinstance(step, int) or step < curve.last:  # a resumed run does steps again
            return state, curve_of(await steps_of(self._store, run.run_id, 0))
        return state, _continued(curve, await steps_of(self._store, run.run_id, curve.last))


def curve_of(rows: Sequence[dict[str, Any]]) -> Curve:
    """The curve that these rows of metrics draw."""

    def points(name: str) -> list[Point]:
        return [(row["step"], row[name]) for row in rows if row.get(name) is not None]

    if not rows:
        return Curve()
    return Curve(points("reward"), points("val_reward"), rows[-1].get("step"), rows[0].get("time"))


def _continued(curve: Curve, rows: Sequence[dict[str, Any]]) -> Curve:
    """With rows from its last step on."""
    if not rows:
        return curve
    first, new = rows[0]["step"], curve_of(rows)
    return Curve(
        [*(p for p in curve.rewards if p[0] < first), *new.rewards],
        [*(p for p in curve.validated if p[0] < first), *new.validated],
        new.last,
        curve.began,
    )


async def steps_of(store: SqlLightningStore, run_id: str, first: int) -> list[dict[str, Any]]:
    """The metrics of each step from `first` on, in order; of a step that was done again, the last ones."""
    found = await store.query_run_events(run_id, kind_in=["step"], step_min=first, limit=MOST_STEPS)
    rows = {event.step: {**event.data, "step": event.step, "time": event.time} for event in found}
    return [rows[step] for step in sorted(rows, key=lambda step: step or 0)]
