"""`Fleet`: all replicas of an engine. Which of them samples a request, which one next, and when none is left."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.errors import AgentLightningError, BackendDied, EngineError, message_of
from agentlightning.types.arrays import Int32Array

SLACK = 4
"""So many more requests than the least busy replica may one have, before what belongs to it goes elsewhere."""
TRIES = 5
"""How often a request is sent, when replicas are lost while they sample it."""


class KeptReplica(Protocol):
    """A replica that keeps itself alive."""

    name: str
    running: int
    """Requests that it is sampling."""
    ready: asyncio.Event
    """Set while it can sample, from the current weights."""
    publication_seconds: float
    """How long it took to take up what was published last; 0 before that."""

    def lost(self, cause: BackendDied) -> None:
        """A request found that it is gone, or not as it should be: it is not ready until that is put right."""
        ...

    async def run(self) -> None:
        """Keep it alive until cancelled; raises EngineError when it gives up."""
        ...


Replica = TypeVar("Replica", bound=KeptReplica)


class Fleet(Generic[Replica]):
    """Started once, closed once. Usable as long as one replica is, or will be."""

    def __init__(self, replicas: Sequence[Replica], slots: int) -> None:
        """Each replica samples so many requests at the same time; more wait in it."""
        self.replicas = list(replicas)
        self._slots = slots
        self.leaving: set[Replica] = set()
        """Those that get no new requests, as long as others are ready."""
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._added = asyncio.Event()

    async def start(self) -> None:
        """Wait until all are ready. Raises EngineError when one cannot be; then none is left running."""
        self._tasks = {replica: asyncio.create_task(replica.run()) for replica in self.replicas}
        ready = [asyncio.create_task(replica.ready.wait()) for replica in self.replicas]
        all_ready = asyncio.ensure_future(asyncio.gather(*ready))
        try:
            await asyncio.wait([all_ready, *self._tasks.values()], return_when=asyncio.FIRST_COMPLETED)
            if not all_ready.done():
                for task in self._tasks.values():
                    if task.done():
                        task.result()
        except AgentLightningError:
            await self.close()
            raise
        finally:
            all_ready.cancel()

    async def close(self) -> None:
        """End all of them. Idempotent."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def add(self, replica: Replica) -> None:
        """Begin to keep one more alive; it samples once it is ready."""
        self.replicas.append(replica)
        self._tasks[replica] = asyncio.create_task(replica.run())
        self._added.set()
        self._added = asyncio.Event()

    async def remove(self, replica: Replica) -> None:
        """End one of several; what it was sampling is sampled again by another one."""
        self.replicas.remove(replica)
        self.leaving.discard(replica)
        task = self._tasks.pop(replica)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def has_given_up(self, replica: Replica) -> bool:
        return self._tasks[replica].done()

    async def watch(self) -> NoReturn:
        """Wait until the last replica has given up."""
        raise BackendDied(await self._over())

    @property
    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready.is_set()]

    async def pick(self, key: str) -> Replica:
        """A ready replica; waits for one. The same for the same key, so that it finds its prompts' contexts there,
        unless that one has much more to do than another, or is full while another is not. Raises BackendDied when none
        will ever be ready again."""
        while not (ready := self.ready):
            await self._until_one_is_ready()
        ready = [replica for replica in ready if replica not in self.leaving] or ready
        home = max(ready, key=lambda replica: zlib.crc32(f"{replica.name}\0{key}".encode()))
        idle = min(ready, key=lambda replica: replica.running)
        must_wait = home.running >= self._slots > idle.running
        return home if home.running <= idle.running + SLACK and not must_wait else idle

    async def sample(
        self,
        prompt_ids: Int32Array,
        params: SamplingParams,
        on: Callable[[Replica], AsyncGenerator[Chunk, None]],
    ) -> AsyncGenerator[Chunk, None]:
        """What `on` gives on a replica. A request whose replica is lost (`on` raises BackendDied) is sampled again from
        its beginning by another, as long as nothing of it was given out."""
        key = params.owner or prompt_ids[:64].tobytes().hex()
        for tried in range(1, TRIES + 1):
            replica = await self.pick(key)
            given = False
            try:
                async with aclosing(on(replica)) as chunks:
                    async for chunk in chunks:
                        given = True
                        yield chunk
                return
            except BackendDied as lost:
                replica.lost(lost)
                if given or tried == TRIES:
                    raise EngineError(f"A request was lost with its engine, after {tried} tries. {lost}") from lost
                await asyncio.sleep(0)

    async def _until_one_is_ready(self) -> None:
        over = asyncio.create_task(self._over())
        events = [self._added, *(replica.ready for replica in self.replicas)]
        waits = [over, *(asyncio.create_task(event.wait()) for event in events)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if over.done() and not self.ready:
                raise BackendDied(over.result())
        finally:
            for wait in waits:
                wait.cancel()

    async def _over(self) -> str:
        """Wait until all have given up; why."""
        while any(not task.done() for task in self._tasks.values()):  # others may be added meanwhile
            await asyncio.wait(self._tasks.values())
        ended = list(self._tasks.values())
        causes = [message_of(e) for t in ended if not t.cancelled() and (e := t.exception()) is not None]
        return "\n".join(causes) or "All engines were stopped."


async def first_end(*watches: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """Wait until the first of them raises, and raise that; the others are cancelled."""
    ends = [asyncio.create_task(watch) for watch in watches]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            if end.done():
                end.result()
        raise EngineError("The backend ended.")
    finally:
        for end in ends:
            end.cancel()
            with suppress(asyncio.CancelledError, EngineError):
                await end
