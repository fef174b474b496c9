"""vLLM servers as the engines: each is started, ended and given weights by an actor on its machine.

Requests go to a server over HTTP, at its machine's address and with a key that only this run has. Weights go to its
actor through Ray's object store, and from there to the server through the machine's shared memory.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.ray.carry import Weights
from agentlightning.backend.ray.cluster import this_machine
from agentlightning.backend.ray.engines import Place
from agentlightning.backend.ray.host import Host
from agentlightning.backend.ray.options import RayOptions
from agentlightning.backend.ray.server import Placed
from agentlightning.backend.vllm.api import Sums
from agentlightning.backend.vllm.options import ServerOptions, find_vllm, shared_memory
from agentlightning.backend.vllm.process import ServerContent, ServerProcess, arguments, environment, free_port
from agentlightning.backend.vllm.publication import for_all
from agentlightning.backend.vllm.replica import Bring, Replica
from agentlightning.backend.vllm.servers import Servers
from agentlightning.engine.base import EngineInfo
from agentlightning.errors import AgentLightningError, BackendDied, ConfigError, EngineError
from agentlightning.keys import new_key


class VLLMServer(Host):
    """An actor with one server."""

    def __init__(self, name: str, level: int, folder: str) -> None:
        super().__init__(name, level, folder)
        self._weights = Path(shared_memory() or tempfile.gettempdir()) / f"{self._folder.name}-weights"
        self._address = ("", 0)
        self._process: ServerProcess | None = None

    def listen(self, host: str | None = None) -> tuple[str, int, str, int, str]:
        """Where the server will be. The key comes with `start`."""
        host = host or this_machine()
        self._address = host, free_port(host)
        return *self._address, "", os.getpid(), self._machine()

    async def start(self, served: ServerContent, options: ServerOptions, key: str) -> str:
        """Its log. Raises ConfigError where there is no vLLM on this machine."""
        host, port = self._address
        try:
            program = find_vllm(options.command)
        except ConfigError as error:
            raise ConfigError(f"{self._name} on {this_machine()}: {error}") from None
        log = Path(tempfile.gettempdir()) / f"{self._folder.name}-{self._name.replace(' ', '-')}.log"
        command = arguments(program, served, options, host, port)
        self._process = await ServerProcess.start(command, environment(options, key), log)
        return str(log)

    async def until_ended(self) -> str:
        assert self._process is not None
        return str(await self._process.ended)

    async def last_words(self) -> str:
        assert self._process is not None
        return await self._process.last_words()

    async def stop(self) -> None:
        if self._process is not None:
            await self._process.stop()


class PlacedServer:
    """A `Server`, with the actor that has it."""

    def __init__(self, host: Placed, log: str, weights: Weights) -> None:
        self.host = host
        self._weights = weights
        self.log = Path(log)
        self.ended: asyncio.Future[EngineError] = asyncio.ensure_future(self._until_ended())

    async def _until_ended(self) -> EngineError:
        try:
            return EngineError(f"{self.host}: {await self.host.ask('until_ended')}")
        except EngineError as error:
            return error

    async def last_words(self) -> str:
        try:
            return await self.host.ask("last_words")
        except EngineError:
            return ""

    async def stop(self) -> None:
        with suppress(AgentLightningError):
            await self.host.ask("stop")
        await self._weights.leave(self.host)
        self.host.end()


class ToServers:
    """An `Exchange` for servers on the cluster."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    @property
    def published_bytes(self) -> int:
        return self._weights.written_bytes

    async def put(self, policy: str, name: str) -> Sums:
        return await self._weights.put(policy, name, summed=True)

    async def spread(self, name: str, replicas: Sequence[Replica]) -> None:
        present = [replica for replica in replicas if isinstance(replica.process, PlacedServer)]
        self._weights.expect(name, [_host_of(replica) for replica in present])
        await for_all(present, lambda replica: self.give(name, replica))

    async def give(self, name: str, replica: Replica) -> str:
        return await self._weights.give_to(_host_of(replica), name)

    async def take_back(self, name: str, replica: Replica) -> None:
        await self._weights.take_from(_host_of(replica), name)

    async def forget(self, name: str) -> None:
        await self._weights.forget(name)


def _host_of(replica: Replica) -> Placed:
    if not isinstance(replica.process, PlacedServer):
        raise BackendDied(f"{replica.name} has just ended.")
    return replica.process.host


def vllm_servers(
    spec: ModelSpec, options: RayOptions, served: ServerContent, info: EngineInfo, weights: Weights, place: Place
) -> tuple[Servers, Callable[[int], Replica]]:
    """What samples for the policies, not started yet, and what makes one more with a number."""
    key = new_key()

    def replica(number: int, bring: Bring) -> Replica:
        async def launch() -> tuple[str, PlacedServer]:
            host = await place(VLLMServer, number)
            try:
                model = await weights.models.path(served.model, [host])
                log = await host.ask("start", replace(served, model=model), options.vllm, key)
            except BaseException:  # its place is for the next one
                host.end()
                raise
            return f"http://{host.address.host}:{host.address.port}", PlacedServer(host, log, weights)

        return Replica(
            f"engine {number}",
            "http://localhost",
            api_key=key,
            launch=launch,
            bring=bring,
            start_seconds=options.start_seconds,
            restarts=options.restarts,
        )

    def replicas(bring: Bring) -> Sequence[Replica]:
        return [replica(number, bring) for number in range(options.first_engines)]

    servers = Servers(spec, served, info, ToServers(weights), replicas)
    return servers, lambda number: replica(number, servers.bring)
