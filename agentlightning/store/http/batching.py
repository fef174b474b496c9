"""Small writes on their way to a server, sent together: what is added during a request goes with the next one.

Adding returns when the write is stored. At most `MAX_WAITING` writes wait; who adds more waits for room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_BATCH = 256
MAX_WAITING = 8192


class Batcher(Generic[Item, Result]):
    """Belongs to one event loop. `send` returns a result, or an error, for each item."""

    def __init__(self, send: Callable[[Sequence[Item]], Awaitable[Sequence[Result | Exception]]]):
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._slots = asyncio.Semaphore(MAX_WAITING)
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, item: Item) -> Result:
        async with self._slots:
            future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
            self._waiting.append((item, future))
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush(), name="agl-store-batch")
            return await future

    async def _flush(self) -> None:
        while self._waiting:
            batch = self._waiting[:MAX_BATCH]
            del self._waiting[:MAX_BATCH]
            results: Sequence[Result | Exception]
            try:
                results = await self._send([item for item, _ in batch])
            except Exception as error:  # whatever it is, it belongs to those who wait, and the next batch is tried
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # its caller was cancelled
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
