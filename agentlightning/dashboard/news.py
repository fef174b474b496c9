"""What changed, told to open pages as server-sent events: one look at the store a second (fewer where a look takes
long), however many pages are open, and none while no page is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from agentlightning.dashboard.runs import REPORTED
from agentlightning.dashboard.texts import as_json
from agentlightning.errors import StoreError
from agentlightning.store.sql import SqlLightningStore

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LOOK_SHARE = 0.02
"""Of the time, looked at the store at most: the next look is later where one takes long."""
ALIVE_SECONDS = 15.0
MOST_PAGES = 100
RUNS = 50
"""The latest ones are watched."""


class News:
    """Of one store."""

    def __init__(self, store: SqlLightningStore) -> None:
        self._store = store
        self._pages = 0
        self._state: dict[str, Any] | None = None
        self._changed = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    async def stream(self) -> AsyncIterator[bytes]:
        """The stream of one page: what is so now, and again whenever it is otherwise."""
        if self._closed or self._pages >= MOST_PAGES:
            yield b"event: full\ndata: {}\n\n"
            return
        self._pages += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        sent: dict[str, Any] | None = None
        try:
            while not self._closed or self._state is not sent:
                if self._state is not sent:
                    sent = self._state
                    yield b"data: " + as_json(sent) + b"\n\n"
                if not await self._wait(sent):
                    yield b": still here\n\n"
        finally:
            self._pages -= 1
            if self._pages == 0 and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    async def _wait(self, sent: dict[str, Any] | None) -> bool:
        """False if nothing changed for a while."""
        try:
            async with asyncio.timeout(ALIVE_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._closed or self._state is not sent)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Tell how things stand for the last time."""
        if self._pages:
            await self._look_once()
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def _look(self) -> None:
        while True:
            began = time.monotonic()
            await self._look_once()
            await asyncio.sleep(max(LOOK_SECONDS, (time.monotonic() - began) / LOOK_SHARE))

    async def _look_once(self) -> None:
        try:
            state = await self._read()
        except StoreError as error:
            logger.debug("The dashboard could not look at the store: %s", error)
            return
        if state != self._state:
            async with self._changed:
                self._state = state
                self._changed.notify_all()

    async def _read(self) -> dict[str, Any]:
        statistics = await self._store.statistics()
        found = await self._store.query_runs(sort_by="start_time", sort_order="desc", limit=RUNS)
        runs = {}
        for run in found:
            last = None
            if run.status == "running":
                last = await self._store.query_run_events(
                    run.run_id, kind_in=list(REPORTED), sort_order="desc", limit=1
                )
            runs[run.run_id] = {
                "status": run.status,
                "step": run.state.get("step"),
                "doing": run.state.get("doing"),
                "said": last[0].event_id if last else None,
            }
        return {"runs": runs, "rollouts": statistics["rollouts"], "workers": statistics["total_workers"]}
