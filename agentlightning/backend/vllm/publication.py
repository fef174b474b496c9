"""How weights get from the learner to the servers: as an adapter under a new name, or all of them in place of the old.

Both go through a directory (in shared memory where there is some) that a `WeightExchange` brings to the machines of the
servers. The current weights are kept there, so that a server that starts again can be given them.

    adapter       a new name and a new directory for each version; requests under way finish with the adapter that they
                  began with, and the one before the last is unloaded. Nothing waits.
    all weights   requests under way finish or are held (`Gate`), the server takes the weights in place and forgets all
                  contexts, new tokens carry the new version, and what was held goes on.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentlightning.backend.vllm.api import Sums
from agentlightning.backend.vllm.replica import Replica
from agentlightning.backend.vllm.worker.agl_vllm_worker import sums_of
from agentlightning.errors import BackendDied, EngineError, ModelError

logger = logging.getLogger(__name__)

Export = Callable[[str, str], Awaitable[None]]
"""Writes the weights of a policy into a directory."""


class WeightExchange(Protocol):
    """How directories with weights get from the learner to where servers read them. Each has a name of its own."""

    @property
    def published_bytes(self) -> int:
        """Bytes that were written where servers read them, since the start."""
        ...

    async def put(self, policy: str, name: str) -> Sums:
        """Have the learner write the weights of a policy; their checksums where it wrote them."""
        ...

    async def spread(self, name: str, replicas: Sequence[Replica]) -> None:
        """Bring them to where these replicas read them, at once. One to which they did not get is given them later."""
        ...

    async def give(self, name: str, replica: Replica) -> str:
        """Where this replica reads them, brought there if they were not yet. Raises BackendDied where it is gone."""
        ...

    async def take_back(self, name: str, replica: Replica) -> None:
        """The replica reads them no more. Raises BackendDied where it is gone."""
        ...

    async def forget(self, name: str) -> None:
        """No replica will be given them again."""
        ...


class SharedFolder:
    """An `WeightExchange` for servers that see the learner's folders."""

    def __init__(self, folder: Path, export: Export) -> None:
        self._folder = folder
        self._export = export
        self.published_bytes = 0

    async def put(self, policy: str, name: str) -> Sums:
        await self._export(policy, str(self._folder / name))
        self.published_bytes += bytes_in(self._folder / name)
        return await asyncio.to_thread(sums_of, str(self._folder / name))

    async def spread(self, name: str, replicas: Sequence[Replica]) -> None:
        pass

    async def give(self, name: str, replica: Replica) -> str:
        return str(self._folder / name)

    async def take_back(self, name: str, replica: Replica) -> None:
        pass

    async def forget(self, name: str) -> None:
        await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """What a request must ask a server for."""

    adapter: str | None
    """By name; None: what the server holds itself."""
    version: int
    """What is current."""
    says_version: bool
    """Whether the server says for each token by which version it was sampled."""


class ServerPublication(Protocol):
    """What is current, and how it gets to servers."""

    def target(self, policy: str) -> RequestTarget: ...

    async def bring(self, replica: Replica) -> None:
        """Give a server that just began what is current."""
        ...

    async def publish(self, policy: str, version: int, replicas: Sequence[Replica]) -> None:
        """Let the replicas sample from the learner's weights; one that is lost on the way gets them when it is back."""
        ...


class AdapterPublication:
    """One adapter per policy. A policy that was never published is the base model: the frozen one."""

    def __init__(self, exchange: WeightExchange) -> None:
        self._exchange = exchange
        self._current: dict[str, tuple[str, int]] = {}
        self._sums: dict[str, Sums] = {}
        """By adapter."""
        self._before: dict[str, str] = {}
        self._run = uuid.uuid4().hex[:8]
        self._lock = asyncio.Lock()

    def target(self, policy: str) -> RequestTarget:
        name, version = self._current.get(policy, (None, 0))
        return RequestTarget(name, version, says_version=False)

    async def bring(self, replica: Replica) -> None:
        async with self._lock:
            known = await replica.api.adapters()
            for name, _ in self._current.values():
                if name not in known:
                    await self._load(name, replica)

    async def publish(self, policy: str, version: int, replicas: Sequence[Replica]) -> None:
        async with self._lock:
            name = f"{policy}-{self._run}-v{version}"
            self._sums[name] = await self._exchange.put(policy, name)
            await self._exchange.spread(name, replicas)
            await for_all(replicas, lambda replica: timed(replica, self._load(name, replica)))
            old, self._before[policy] = self._before.get(policy), self._current.get(policy, ("", 0))[0]
            self._current[policy] = name, version
            if old:
                await for_all(replicas, lambda replica: self._unload(old, replica))
                await self._exchange.forget(old)
                del self._sums[old]

    async def _load(self, name: str, replica: Replica) -> None:
        path = await self._exchange.give(name, replica)
        await replica.api.check(path, self._sums[name])
        await replica.api.load_adapter(name, path)

    async def _unload(self, name: str, replica: Replica) -> None:
        """A server that began after this adapter was current does not have it."""
        if name in await replica.api.adapters():
            await replica.api.unload_adapter(name)
            await self._exchange.take_back(name, replica)


class WeightsPublication:
    """All weights of the one policy. Before the first publication servers hold what they were started with."""

    def __init__(self, exchange: WeightExchange, gate: Gate, version: int) -> None:
        self._exchange = exchange
        self._gate = gate
        self._version = version
        self._name: str | None = None
        self._sums: Sums = {}
        self._lock = asyncio.Lock()

    def target(self, policy: str) -> RequestTarget:
        return RequestTarget(None, self._version, says_version=True)

    async def bring(self, replica: Replica) -> None:
        async with self._lock:
            await self._take(replica)

    async def publish(self, policy: str, version: int, replicas: Sequence[Replica]) -> None:
        async with self._lock:
            name = f"{policy}-v{version}"
            sums = await self._exchange.put(policy, name)
            await self._exchange.spread(name, replicas)  # while they sample
            async with self._gate.closed():
                old, self._name, self._sums, self._version = self._name, name, sums, version
                await for_all(replicas, lambda replica: timed(replica, self._take(replica)))
            if old is not None:
                await self._exchange.forget(old)

    async def _take(self, replica: Replica) -> None:
        """Between pause and resume nothing is computed, and pausing forgets all contexts: nothing that old weights
        computed is used again."""
        api, path = replica.api, None
        if self._name is not None:
            path = await self._exchange.give(self._name, replica)
            await api.check(path, self._sums)
        await api.pause()
        if path is not None:
            await api.load_weights(path)
        await api.set_version(self._version)
        await api.resume()
        if self._name is not None:
            await self._exchange.take_back(self._name, replica)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def timed(replica: Replica, taking: Awaitable[object]) -> None:
    began = time.perf_counter()
    await taking
    replica.publication_seconds = time.perf_counter() - began


async def for_all(replicas: Sequence[Replica], change: Callable[[Replica], Awaitable[object]]) -> None:
    """Change all replicas. One that is lost meanwhile, or fails while others do not, is left to whoever looks after it:
    it gets the current weights before it samples, or is replaced. Raises the error where all that are alive fail.
    """

    async def one(replica: Replica) -> EngineError | ModelError | None:
        try:
            await change(replica)
        except (EngineError, ModelError) as error:
            return error
        return None

    ends = await asyncio.gather(*(one(replica) for replica in replicas))
    failed = [error for error in ends if error is not None and not isinstance(error, BackendDied)]
    if failed and len(failed) == len([error for error in ends if not isinstance(error, BackendDied)]):
        raise failed[0]
    for replica, error in zip(replicas, ends, strict=True):
        if error is not None:
            logger.warning("%s did not take what was published; it is tried again. %s", replica.name, error)
            replica.suspect(stale=True)


class Gate:
    """Who may sample while weights change. Open at first; closing it lets no request in, and those inside go on."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._closed = 0
        self._must_finish = 0

    @asynccontextmanager
    async def inside(self, *, must_finish: bool) -> AsyncIterator[None]:
        """Wait until the gate is open. With `must_finish` weights change only after the block."""
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
        """Let no request in. Each `close` needs an `open`."""
        async with self._changed:
            self._closed += 1

    async def open(self) -> None:
        """Undo one `close`; without one it changes nothing."""
        async with self._changed:
            self._closed = max(0, self._closed - 1)
            self._changed.notify_all()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """No request enters during the block, and those that must finish have done so before it."""
        await self.close()
        try:
            async with self._changed:
                await self._changed.wait_for(lambda: not self._must_finish)
            yield
        finally:
            await self.open()
