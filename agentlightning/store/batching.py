"""Spans on their way to a server, sent together: what is added while a request is under way goes with the next one.

Adding returns when the span is stored. At most `MAX_WAITING` spans wait; who adds more waits for room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from agentlightning.errors import StoreError, StoreUnavailableError
from agentlightning.types import Span

MAX_BATCH = 256
MAX_WAITING = 8192

Send = Callable[[Sequence[Span]], Awaitable[Sequence[Span]]]


class SpanBatcher:
    """Belongs to one event loop. `send` stores spans and returns those that were new."""

    def __init__(self, send: Send):
        self._send = send
        self._waiting: list[tuple[Span, asyncio.Future[Span | None]]] = []
        self._room = asyncio.Semaphore(MAX_WAITING)
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, span: Span) -> Span | None:
        """The stored span, or None if it was there already."""
        async with self._room:
            future: asyncio.Future[Span | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((span, future))
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush(), name="agl-store-spans")
            return await future

    async def _flush(self) -> None:
        while self._waiting:
            batch = self._waiting[:MAX_BATCH]
            del self._waiting[:MAX_BATCH]
            try:
                await self._deliver(batch)
            except Exception as error:  # whatever it is, it belongs to those who wait, and the next batch is tried
                for _, future in batch:
                    _fail(future, error)

    async def _deliver(self, batch: Sequence[tuple[Span, asyncio.Future[Span | None]]]) -> None:
        try:
            stored = await self._send([span for span, _ in batch])
        except StoreUnavailableError:
            raise
        except StoreError:
            # One bad span must not fail the others: send them one by one.
            if len(batch) == 1:
                raise
            for span, future in batch:
                try:
                    await self._deliver([(span, future)])
                except StoreError as error:
                    _fail(future, error)
            return
        by_id = {(span.attempt_id, span.span_id): span for span in stored}
        for span, future in batch:
            if not future.done():
                future.set_result(by_id.pop((span.attempt_id, span.span_id), None))


def _fail(future: asyncio.Future[Span | None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
