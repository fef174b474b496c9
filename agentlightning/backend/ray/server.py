"""A model process on a machine of the cluster, as the main process sees it."""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from agentlightning.backend.embedded.connection import Connection
from agentlightning.backend.embedded.protocol import ProcessSettings, SocketAddress
from agentlightning.errors import AgentLightningError, BackendDied, EngineError, message_of_ray

logger = logging.getLogger(__name__)

_SECONDS_TO_NAME = 20.0
"""A dead process is known to be dead after its connections are gone: a bit on a quiet machine, seconds on a busy one.
Where the first rank died by itself nobody waits so long, as the others end with it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A `Host` that is there."""

    name: str
    actor: Any
    address: SocketAddress
    pid: int
    machine: str
    """The same for all that see the same files."""

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid} on {self.address.host})"

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Have it do something with files. Raises BackendDied where it is gone."""
        from ray.exceptions import RayActorError, RayTaskError  # pyright: ignore[reportMissingImports]

        try:
            return await getattr(self.actor, method).remote(*arguments)
        except RayActorError as error:
            raise BackendDied(f"{self} ended: {message_of_ray(error)}") from error
        except RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, AgentLightningError) else EngineError(f"{self}: {cause}") from error

    def end(self) -> None:
        import ray  # pyright: ignore[reportMissingImports]

        if ray.is_initialized():  # with the connection its actors are gone, and asking would make a new one
            ray.kill(self.actor)


async def arrived(name: str, actor: Any, seconds: float, at: str | None = None) -> Placed:
    """Wait until it answers, and listens at this address. Raises BackendDied where it does not in so many seconds."""
    from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

    try:
        async with asyncio.timeout(seconds):
            host, port, key, pid, machine = await actor.listen.remote(at)
    except TimeoutError:
        raise BackendDied(f"{name} found no place on the Ray cluster within {seconds:g} s.") from None
    except RayError as error:
        raise BackendDied(f"{name} could not be started on the Ray cluster: {message_of_ray(error)}") from error
    return Placed(name, actor, SocketAddress(host, port, key), pid, machine)


class RayServer(Connection):
    """A server in the first of some hosts, the others being further ranks of its learner."""

    def __init__(self, hosts: Sequence[Placed]) -> None:
        super().__init__(self._supervise)
        self.pid = hosts[0].pid
        self._hosts = hosts
        self._over = False
        first, *others = hosts
        # Ray's references can be awaited, and are no coroutines.
        self._ends = {asyncio.ensure_future(_until(first.actor.serve.remote())): first}
        self._ends |= {asyncio.ensure_future(_until(other.actor.follow.remote())): other for other in others}

    @classmethod
    async def spawn(cls, settings: ProcessSettings, hosts: Sequence[Placed]) -> Self:
        """Hand the settings to hosts that wait; usable once `ready` is done."""
        server, first = cls(hosts), hosts[0].address
        try:
            await asyncio.get_running_loop().create_connection(lambda: server, first.host, first.port)
        except OSError as error:
            await server.kill()
            raise EngineError(f"{hosts[0]} cannot be reached: {error}. Are its ports open to this machine?") from error
        assert server._transport is not None
        server._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server._transport.write(first.key.encode())
        server.send(msgspec.structs.replace(settings, followers=[host.address for host in hosts[1:]]))
        return server

    def _kill(self) -> None:
        if self._over:  # by now this process may be connected to another cluster
            return
        for host in self._hosts:
            host.end()

    async def _supervise(self) -> str:
        """Until the first of them ends, which is the end of all."""
        await asyncio.wait(self._ends, return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping and len(self._hosts) > 1:
            await asyncio.wait(self._ends, timeout=_SECONDS_TO_NAME)
        host, error = _cause([(host, task) for task, host in self._ends.items() if task.done()])
        self._kill()
        self._over = True
        await asyncio.wait(self._ends)
        for other in self._ends:
            other.exception()  # marks it as seen: its caller has the error
        how = "ended by itself" if error is None else f"ended: {message_of_ray(error)}"
        return f"{host} {how}"


def _cause(ended: Sequence[tuple[Placed, asyncio.Future[Any]]]) -> tuple[Placed, BaseException | None]:
    """Which end was the cause of the others: of those whose process died the last, since the first rank follows any
    other; the others only fail."""
    from ray.exceptions import ActorDiedError  # pyright: ignore[reportMissingImports]

    died = [pair for pair in ended if isinstance(pair[1].exception(), ActorDiedError)]
    host, task = (died or ended)[-1]
    return host, task.exception()


async def _until(reference: Any) -> Any:
    return await reference
