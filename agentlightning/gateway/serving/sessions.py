"""Attempts of clients that belong to no rollout: one for each request, or one for all requests of a session.

A session is named by its program's header (`agent_names.session_name`), or made of a chain of answers of which each
request names an earlier one. Its requests are calls of one attempt, so that each goes on from the tokens that were
sampled before it. Who sends another key has another session of that name. An attempt ends when its session was not used
for a while, when there are too many, or with the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from agentlightning.errors import AgentLightningError
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, AttemptStatus, Outcome, RolloutMode

logger = logging.getLogger(__name__)

MOST = 1000
"""Sessions that are kept without a request."""
_OVER = (AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.TIMEOUT)

Ids = tuple[str, str]
"""Of a rollout and its attempt."""
End = Callable[[str, str], Awaitable[object]]


@dataclass(eq=False)
class NamedSession:
    name: str
    kept: bool
    """Whether another request may come."""
    ids: Ids | None = None
    requests: int = 0
    used: float = 0.0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """`seconds`: how long a session that is not used is kept; 0: each request is an attempt of its own. `ended` is
    called with the id of each rollout that is over.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        most: int = MOST,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        self._seconds = seconds
        self._ended = ended
        self._most = most
        self._clock = clock
        self._open: OrderedDict[bytes, NamedSession] = OrderedDict()
        self._sweeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def attempt(
        self, store: LightningStore, end: End, client: str, session: str | None, path: str
    ) -> AsyncIterator[tuple[NamedSession, Ids]]:
        """The session of a request, a new one without a name, and its attempt; `end` tells the gateway that one is
        over. It ends here unless the session has a name, or is `kept` because one was given to it.
        """
        name = session or uuid.uuid4().hex
        key = hashlib.blake2b(f"{client}\0{name}".encode()).digest()
        if not self._seconds:
            name, key = "", uuid.uuid4().bytes
        found = self._open.setdefault(key, NamedSession(name, kept=session is not None))
        self._open.move_to_end(key)
        found.requests += 1
        try:
            async with found.starting:
                if found.ids is None or not await _goes_on(store, found.ids):
                    found.ids = await _start(store, path)
            yield found, found.ids
        finally:
            found.requests -= 1
            found.used = self._clock()
            if not self._seconds or not found.kept:
                if key in self._open:  # else the server is being closed, which ends it
                    await asyncio.shield(self._finish(store, end, key))
            elif self._sweeping is None or self._sweeping.done():
                self._sweeping = asyncio.create_task(self._sweep(store, end))

    async def close(self, store: LightningStore, end: End) -> None:
        """End the attempts of all sessions."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        for key in list(self._open):
            self._finish(store, end, key)
        await asyncio.gather(*self._ending)

    async def _sweep(self, store: LightningStore, end: End) -> None:
        """End what was not used for long, and the oldest ones of too many, as long as there is a session."""
        while self._open:
            now = self._clock()
            idle = [(key, one) for key, one in self._open.items() if not one.requests]
            old = [key for key, one in idle if now - one.used >= self._seconds]
            for key in [*old, *(key for key, _ in idle[len(old) : len(idle) - self._most])]:
                await asyncio.shield(self._finish(store, end, key))
            await asyncio.sleep(min(self._seconds, 10.0))

    def _finish(self, store: LightningStore, end: End, key: bytes) -> asyncio.Task[None]:
        """End the attempt of a session, to its end even if the server stops meanwhile."""
        ending = asyncio.create_task(self._end_if_begun(store, end, self._open.pop(key).ids))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def _end_if_begun(self, store: LightningStore, end: End, ids: Ids | None) -> None:
        try:
            if ids is not None:
                await _end(store, end, ids)
                if self._ended is not None:
                    await self._ended(ids[0])
        except AgentLightningError as error:  # one that cannot be ended keeps none of the others
            logger.warning("The attempt of a session could not be ended: %s", error)


async def _start(store: LightningStore, path: str) -> Ids:
    claimed = await store.start_rollout({"path": path}, RolloutMode.TEST)
    return claimed.rollout_id, claimed.attempt.attempt_id


async def _goes_on(store: LightningStore, ids: Ids) -> bool:
    """Whether an attempt is still open in the store."""
    rollout = await store.get_rollout_by_id(ids[0])
    if not isinstance(rollout, AttemptedRollout) or rollout.attempt.attempt_id != ids[1]:
        return False
    return rollout.attempt.status not in _OVER


async def _end(store: LightningStore, end: End, ids: Ids) -> None:
    await end(*ids)
    await store.update_attempt(*ids, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)
