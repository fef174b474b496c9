"""Places at a provider, or in a process for large requests: so many at once, and who waits takes turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Places:
    """A semaphore that is fair to its owners: one that asks for a thousand places at once delays another's by one."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        """The calls of each owner; whose turn is next stands first."""

    @asynccontextmanager
    async def one(self, owner: Hashable) -> AsyncIterator[None]:
        """Hold a place of the owner's in this context."""
        await self._take(owner)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, owner: Hashable) -> None:
        if self._free and not self._waiting:
            self._free -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            owner, calls = self._waiting.popitem(last=False)
            place = calls.popleft()
            if calls:
                self._waiting[owner] = calls
            if not place.done():  # cancelled: its client went away
                place.set_result(None)
                return
        self._free += 1
