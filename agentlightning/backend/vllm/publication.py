"""How weights get from the learner to the servers: as an adapter under a new name, or all of them in place of the old.

Both go through a directory that learner and servers see (shared memory where there is some). What is current is kept
there, so that a server that starts again can be given it.

    adapter       a new name and a new directory for each version; requests under way finish with the adapter that they
                  began with, and the one before the last is unloaded. Nothing waits.
    all weights   requests under way finish or are held, the server takes the weights in place and forgets all contexts,
                  new tokens carry the new version, what was held goes on.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentlightning.backend.vllm.api import Api, ReplicaLost
from agentlightning.backend.vllm.gate import Gate
from agentlightning.backend.vllm.replica import Replica
from agentlightning.errors import EngineError

Export = Callable[[str, str], Awaitable[None]]
"""Writes the weights of a policy into a directory."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a request must ask a server for."""

    adapter: str | None
    """By name; None: what the server holds itself."""
    version: int
    """What is current."""
    says_version: bool
    """Whether the server says for each token by which version it was sampled."""


class Publication(Protocol):
    """What is current, and how it gets to servers."""

    def target(self, policy: str) -> Target: ...

    async def bring(self, api: Api) -> None:
        """Give a server that just began what is current."""
        ...

    async def publish(self, policy: str, version: int, replicas: Sequence[Replica]) -> None:
        """Let the replicas sample from the learner's weights; one that is lost on the way gets them when it is back."""
        ...


class AdapterPublication:
    """One adapter per policy. A policy that was never published is the base model: the frozen one."""

    def __init__(self, exchange: Path, export: Export) -> None:
        self._exchange = exchange
        self._export = export
        self._current: dict[str, tuple[str, int]] = {}
        self._before: dict[str, str] = {}
        self._run = uuid.uuid4().hex[:8]
        self._lock = asyncio.Lock()

    def target(self, policy: str) -> Target:
        name, version = self._current.get(policy, (None, 0))
        return Target(name, version, says_version=False)

    async def bring(self, api: Api) -> None:
        async with self._lock:
            known = await api.adapters()
            for name, _ in self._current.values():
                if name not in known:
                    await api.load_adapter(name, str(self._exchange / name))

    async def publish(self, policy: str, version: int, replicas: Sequence[Replica]) -> None:
        async with self._lock:
            name = f"{policy}-{self._run}-v{version}"
            await self._export(policy, str(self._exchange / name))
            await _for_all(replicas, lambda api: api.load_adapter(name, str(self._exchange / name)))
            old, self._before[policy] = self._before.get(policy), self._current.get(policy, ("", 0))[0]
            self._current[policy] = name, version
            if old:
                await _for_all(replicas, lambda api: api.unload_adapter(old))
                await asyncio.to_thread(shutil.rmtree, self._exchange / old, ignore_errors=True)


class WeightsPublication:
    """All weights of the one policy. Before the first publication servers hold what they were started with."""

    def __init__(self, exchange: Path, export: Export, gate: Gate, version: int) -> None:
        self._exchange = exchange
        self._export = export
        self._gate = gate
        self._version = version
        self._path: Path | None = None
        self._lock = asyncio.Lock()

    def target(self, policy: str) -> Target:
        return Target(None, self._version, says_version=True)

    async def bring(self, api: Api) -> None:
        async with self._lock:
            await self._take(api)

    async def publish(self, policy: str, version: int, replicas: Sequence[Replica]) -> None:
        async with self._lock:
            path = self._exchange / f"{policy}-v{version}"
            await self._export(policy, str(path))
            async with self._gate.closed():
                old, self._path, self._version = self._path, path, version
                await _for_all(replicas, self._take)
            if old is not None:
                await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)

    async def _take(self, api: Api) -> None:
        """Between pause and resume nothing is computed, and pausing forgets all contexts: nothing that old weights
        computed is used again."""
        await api.pause()
        if self._path is not None:
            await api.load_weights(str(self._path))
        await api.set_version(self._version)
        await api.resume()


async def _for_all(replicas: Sequence[Replica], change: Callable[[Api], Awaitable[None]]) -> None:
    """A replica that is lost meanwhile is left to whoever looks after it. Raises EngineError when all are."""

    async def one(replica: Replica) -> EngineError | None:
        try:
            await change(replica.api)
        except ReplicaLost as error:
            replica.suspect(stale=True)
            return error
        return None

    lost = await asyncio.gather(*(one(replica) for replica in replicas))
    if lost and all(lost):
        raise EngineError(f"No vLLM server took what was published. {lost[0]}")
