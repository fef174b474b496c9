"""What the doctor says of runs, for pages: one diagnosis at a time, again only after something changed, and of a run
that goes on never so often that it slows the run down.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from agentlightning.dashboard.texts import shown, texts_of
from agentlightning.doctor import Diagnosis, diagnose, gather
from agentlightning.metrics.catalogue import MEASURED
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Run

SHARE = 0.01
MOST_KEPT = 50


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """An answer, of which state of the run it is, and until when it is good enough while the run goes on."""

    state: object
    answer: Any
    until: float


class Diagnoses:
    """Of the runs of one store. While a run goes on, at most `share` of its time is spent on them."""

    def __init__(self, store: SqlLightningStore, *, share: float = SHARE) -> None:
        self._store = store
        self._share = share
        self._kept: dict[str, Diagnosed] = {}
        self._one_at_a_time = asyncio.Lock()

    async def of(self, run: Run) -> Any:
        """What was found in the run: the same as before where nothing changed, or where it was asked a moment ago."""
        async with self._one_at_a_time:
            state = await self._state(run)
            kept = self._kept.get(run.run_id)
            is_recent = kept is not None and run.status == "running" and time.monotonic() < kept.until
            if kept is not None and (kept.state == state or is_recent):
                return kept.answer
            began = time.monotonic()
            texts, _ = await texts_of(self._store, run.run_id)
            decode = None if texts is None else texts.whole
            found = await asyncio.to_thread(diagnose, await gather(self._store, run), decode)
            took = time.monotonic() - began
            kept = Diagnosed(state, _as_json(found), began + took / self._share)
            self._kept = {**dict(list(self._kept.items())[-MOST_KEPT:]), run.run_id: kept}
            return kept.answer

    async def _state(self, run: Run) -> object:
        last = await self._store.query_run_events(run.run_id, sort_order="desc", limit=1)
        rollouts = (await self._store.statistics())["rollouts"] if run.status == "running" else None
        return run.status, last[0].event_id if last else None, rollouts


def _as_json(found: Diagnosis) -> Any:
    """The diagnosis as JSON, with the numbers that have a title as a list of their own."""
    numbers = found.measured
    listed = [
        {**m._asdict(), "value": numbers[m.name]} for m in MEASURED if isinstance(numbers.get(m.name), int | float)
    ]
    return shown({**found.to_json(), "numbers": listed})
