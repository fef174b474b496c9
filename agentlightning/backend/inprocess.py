"""The in-process backend: the embedded one with its server in a thread of this process.

For debugging (a breakpoint in the learner, a profiler over everything) and for tests. Agents, gateway and model share
one interpreter here, so it is slower than `embedded`, and a crash of the model takes everything with it.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Self

from agentlightning.backend.embedded.backend import EmbeddedBackend
from agentlightning.backend.embedded.connection import Connection
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.backend.embedded.serve import serve
from agentlightning.errors import ConfigError


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
        await asyncio.to_thread(self._thread.join)
        how = "could not load its model" if self._code else "ended by itself"
        return f"The model's thread {how}; the log says why."


class InProcessBackend(EmbeddedBackend):
    """See `Backend`."""

    spawn = staticmethod(ServerThread.spawn)
