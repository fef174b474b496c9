"""`Gate`: who may sample while weights change. Requests enter and leave; whoever changes weights closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open at first. Closing it lets nobody in; those who are inside go on."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._closed = 0
        self._must_finish = 0

    @asynccontextmanager
    async def inside(self, *, must_finish: bool) -> AsyncIterator[None]:
        """Wait until it is open. With `must_finish` weights change only after the block."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._closed)
            self._must_finish += must_finish
        try:
            yield
        finally:
            async with self._changed:
                self._must_finish -= must_finish
                self._changed.notify_all()

    async def close(self) -> None:
        """Let nobody in. As often as it was closed it must be opened."""
        async with self._changed:
            self._closed += 1

    async def open(self) -> None:
        """Undo one `close`; more than were closed change nothing."""
        async with self._changed:
            self._closed = max(0, self._closed - 1)
            self._changed.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nobody enters during the block, and those who must finish have done so before it."""
        await self.close()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._must_finish)
            yield
        finally:
            await self.open()
