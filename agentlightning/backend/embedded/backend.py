"""The embedded backend: one model process holds the engine and the learner of every policy, on one set of weights.

Publishing moves no bytes: the engine stands still from an optimiser step on, and publishing lets it go on with the new
weights, which are in its memory already. `InProcessBackend` runs the same server in a thread of this process, for
debugging (a breakpoint in the learner, a profiler over everything) and for tests: agents, gateway and model then share
one interpreter, so it is slower, and a crash of the model takes everything with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import PurePath
from typing import NoReturn, Self

from agentlightning.backend.base import BackendStats, ModelSpec
from agentlightning.backend.embedded.child import Child
from agentlightning.backend.embedded.client import ModelProcess, PolicyHandle
from agentlightning.backend.embedded.connection import Connection
from agentlightning.backend.embedded.download import fetch
from agentlightning.backend.embedded.protocol import Lora, Pause, ProcessSettings, Reseed, Resume
from agentlightning.backend.embedded.serve import serve
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LearnerOptions
from agentlightning.models import resolve_model


class EmbeddedBackend:
    """See `Backend`. The process is started by `start` and ended by `close`."""

    spawn: Callable[[ProcessSettings], Awaitable[Connection]] = staticmethod(Child.spawn)
    """Where the server runs."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        check_cores(spec.ranks)
        self.process = ModelProcess(settings_of(spec), spawn=self.spawn)

    async def start(self) -> None:
        settings = self.process.settings
        for name in {settings.model, settings.learner.reference or settings.model}:
            await fetch(name)
        await self.process.start()

    def engine(self, policy: str) -> PolicyHandle:
        return self.process.policy(policy)

    def learner(self, policy: str) -> PolicyHandle:
        return self.process.policy(policy)

    async def publish(self, policy: str) -> int:
        return await self.process.policy(policy).publish()

    async def take_up(self, policy: str, uri: str) -> None:
        await self.process.policy(policy).take_up(uri)

    async def pause(self) -> None:
        await self.process.call(self._spec.trained[0], Pause())

    async def resume(self) -> None:
        await self.process.call(self._spec.trained[0], Resume())

    async def reseed(self, seed: int) -> None:
        for alias in (*self._spec.trained, *self._spec.members):
            await self.process.call(alias, Reseed(seed))

    async def watch(self) -> NoReturn:
        await self.process.watch()

    async def stats(self) -> BackendStats:
        return await self.process.stats()

    async def checkpoint(self, uri: str) -> None:
        for alias, model, optimizer in self._places(uri):
            await self.learner(alias).export(model)
            await self.learner(alias).save_state(optimizer)

    async def restore(self, uri: str) -> None:
        for alias, _, optimizer in self._places(uri):
            await self.learner(alias).load_state(optimizer)
            await self.publish(alias)

    async def close(self) -> None:
        await self.process.close()

    def _places(self, uri: str) -> list[tuple[str, str, str]]:
        """Of each policy, its alias and where its weights and its optimiser are; one that is alone has no folder."""
        several = bool(self._spec.adapters)
        root = PurePath(uri)
        folder = {alias: alias if several else "" for alias in self._spec.trained}
        return [(alias, str(root / "model" / f), str(root / "optimizer" / f)) for alias, f in folder.items()]


def check_cores(ranks: int) -> None:
    """Raises ConfigError for more ranks of the learner than one machine can run."""
    if ranks > max(8, 4 * (cores := os.cpu_count() or 1)):
        raise ConfigError(
            f"ranks={ranks} processes would share the {cores} cores of this machine, and a step would take hours. Set "
            f"at most one for each core or GPU; backend='ray' spreads them over machines."
        )


def settings_of(spec: ModelSpec) -> ProcessSettings:
    """The settings of the model process. Raises ModelError where there is no such model, ConfigError for ranks of what
    cannot be spread."""
    if spec.ranks > 1 and (spec.adapters or spec.critic):
        what = "several policies" if spec.adapters else "a critic"
        raise ConfigError(f"ranks={spec.ranks} spreads one policy without a critic; {what} are learned on one rank.")
    if spec.ranks > 1 and spec.offload:
        raise ConfigError(f"offload is for one rank; ranks={spec.ranks} share the optimiser out already: leave it out.")
    if spec.ranks % spec.tensor_parallel:
        raise ConfigError(
            f"tensor_parallel={spec.tensor_parallel} ranks share each layer: let ranks ({spec.ranks}) be a multiple."
        )
    return ProcessSettings(
        model=resolve_model(spec.model),
        device=spec.device,
        dtype=spec.dtype,
        lora=Lora(rank=spec.lora_rank) if spec.lora_rank else None,
        policies=spec.adapters,
        frozen=spec.frozen,
        members=list(spec.members),
        max_context=spec.max_context,
        max_concurrency=spec.max_concurrency,
        seed=spec.seed,
        in_flight=spec.in_flight,
        ranks=spec.ranks,
        tensor_parallel=spec.tensor_parallel,
        learner=LearnerOptions(
            gradient_checkpointing=spec.gradient_checkpointing,
            offload=spec.offload,
            reference=resolve_model(spec.reference) if spec.reference else None,
            critic=spec.critic,
        ),
    )


class ServerThread(Connection):
    """A server in a thread, from `spawn` to its end. A thread cannot be killed: it ends when its socket does."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        super().__init__(self._supervise)
        self._ours, self._theirs = ours, theirs
        self._thread = threading.Thread(target=self._serve, name="agl-model", daemon=True)
        self._code = 1

    @classmethod
    async def spawn(cls, settings: ProcessSettings) -> Self:
        """Start the thread and hand it its settings; it is usable once `ready` is done."""
        if settings.ranks > 1:  # a rank that dies ends the process that rank 0 is in
            raise ConfigError("ranks needs the model in a process of its own: take the embedded or the vllm backend.")
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        server = cls(ours, theirs)
        server._thread.start()
        await asyncio.get_running_loop().create_unix_connection(lambda: server, sock=ours)
        server.send(settings)
        return server

    def _serve(self) -> None:
        with self._theirs:
            self._code = serve(self._theirs, in_a_process=False)

    def _kill(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _supervise(self) -> str:
        try:
            await asyncio.to_thread(self._thread.join)
        except asyncio.CancelledError:  # the loop ends without close(), as at an exception, and waits for its threads
            self._kill()
            raise
        how = "could not load its model" if self._code else "ended by itself"
        return f"The model's thread {how}; the log says why."


class InProcessBackend(EmbeddedBackend):
    """See `Backend`."""

    spawn = staticmethod(ServerThread.spawn)
