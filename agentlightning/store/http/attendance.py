"""Which workers are connected: each keeps one request open, and the end of its connection is known at once.

What a worker holds is given back soon after its connection ended, unless it was heard of again meanwhile. That of a
machine that vanishes without a word ends when it answers no probe of the server's system any more. A worker that has no
such request is found by its leases.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from starlette.requests import Request

from agentlightning.errors import StoreError
from agentlightning.store.sql import SqlLightningStore

logger = logging.getLogger(__name__)

QUIET_SECONDS = 12.0
"""A worker that lives beats more often than that, by whichever connection."""


class Attendance:
    """Of one server; `close` ends the requests that are open."""

    def __init__(self, store: SqlLightningStore) -> None:
        self._store = store
        self._closed = False
        self._staying: set[asyncio.Future[None]] = set()
        """Those that are open: each is ended by `close`."""
        self._releasing: set[asyncio.Task[None]] = set()

    async def stay(self, request: Request, worker_id: str, seconds: float) -> None:
        """Wait so many seconds, or until the worker's connection ends."""
        ended = asyncio.ensure_future(_until_disconnected(request))
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._staying.add(closed)
        try:
            await asyncio.wait({ended, closed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not self._closed:
                task = asyncio.create_task(self._release(worker_id))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)
        finally:
            self._staying.discard(closed)
            for waiting in (ended, closed):
                waiting.cancel()

    async def _release(self, worker_id: str) -> None:
        await asyncio.sleep(QUIET_SECONDS)
        error = f"The connection of worker {worker_id} ended, and it was not heard of again."
        with suppress(StoreError):  # then its leases run out
            if count := await self._store.release_worker(worker_id, error, quiet_seconds=QUIET_SECONDS):
                logger.warning("%s Its %d attempts are handed out again.", error, count)

    async def close(self) -> None:
        self._closed = True
        for staying in self._staying:
            staying.cancel()
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
