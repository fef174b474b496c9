"""A uvicorn server inside the caller's event loop: its socket is bound first, it leaves signals alone, and it is ready
when `start` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agentlightning.errors import AgentLightningError

GRACE_SECONDS = 3


class LoopServer:
    """Serves an ASGI application on `host:port`; port 0 takes a free one.

    `what` it is stands in messages; they are raised as `error`.
    """

    def __init__(self, app: ASGIApp, host: str, port: int, *, what: str, error: type[AgentLightningError]):
        self._app = app
        self._what = what
        self._error = error
        self.host = host
        self.port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        listening = self._bind()
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._until_stopped,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            http=_Protocol,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE_SECONDS,
            backlog=4096,
        )
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]), name=f"agl-{self._what}-http")
        ready = asyncio.ensure_future(self._server.ready.wait())
        await asyncio.wait((ready, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._server.ready.is_set():
            ready.cancel()
            await self._task
            raise self._error(f"The {self._what}'s server did not start on {self.host}:{self.port}; the log says why.")

    async def serve(self) -> None:
        """Wait until it ends."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Finish what is being answered (a few seconds at most) and close. Idempotent."""
        if self._server is None or self._task is None:
            return
        self._server.should_exit = True
        await self._task
        self._server = self._task = None

    async def _until_stopped(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application. A request that is cut off by the server's end (a long poll) leaves no traceback."""
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError as cut_off:
            if self._server is None or not self._server.should_exit:
                raise
            try:
                await send({"type": "http.response.start", "status": 503, "headers": []})
            except RuntimeError:  # it had begun to answer: the client must see that there is no end
                raise cut_off from None
            await send({"type": "http.response.body", "body": b""})

    def _bind(self) -> socket.socket:
        listening = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except (OSError, OverflowError) as error:  # the latter for a port that no port can be
            listening.close()
            why = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
            raise self._error(
                f"The {self._what} cannot listen on {self.host}:{self.port}: {why or error}. "
                "Give another port, or port 0 to take a free one."
            ) from error
        listening.setblocking(False)
        return listening


class _Protocol(AutoHTTPProtocol):
    """HTTP/1.1 whose requests are never logged, whatever other servers of the process ask for: keys stand in URLs."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.access_log = False


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the program that embeds this server."""
        yield
