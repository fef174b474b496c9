"""A uvicorn server inside the caller's event loop: its socket is bound first, it installs no signal handlers, and it is
ready when `start` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from agentlightning.errors import GatewayError


class LoopServer:
    """Serves an ASGI application on `host:port`; port 0 takes a free one."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port it listens on, once it has started."""
        return self._port

    async def start(self) -> None:
        listening = _bind(self._host, self._port)
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            http="httptools",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
            backlog=4096,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name="gateway-http")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not self._server.ready.is_set():
            ready.cancel()
            self._task.result()
            raise GatewayError(f"The gateway's HTTP server did not start on {self._host}:{self._port}.")

    async def stop(self) -> None:
        """Finish what is being sent (3 s at most) and close. Idempotent."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the program that embeds this server."""
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise GatewayError(
            f"The gateway cannot listen on {host}:{port}: {error.strerror or error}. Give another port, or port 0 to "
            "take "
            "a free one."
        ) from error
    listening.setblocking(False)
    return listening
