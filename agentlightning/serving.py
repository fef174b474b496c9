"""A uvicorn server inside the caller's event loop: its socket is bound first, it leaves signals alone, and it is ready
when `start` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentlightning.arguments import explained_class
from agentlightning.errors import AgentLightningError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3
_RESERVE = 256
"""File descriptors that connections leave to files, pipes and other servers, the store's before all."""
_SAY_AGAIN_SECONDS = 60.0
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@explained_class
@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What clients may take of a server that they have not yet told who they are."""

    header_seconds: float = 30.0
    """How long a client may take for the head of a request, from its first byte on, or from when it connects."""
    most: int | None = None
    """Connections at the same time; None for three quarters of the process's file descriptors, less a reserve. Another
    one is refused with 503."""

    @property
    def connections(self) -> int:
        return self.most or max(64, (_file_descriptors() - _RESERVE) * 3 // 4)


class LoopServer:
    """Serves an ASGI application on `host:port`; port 0 takes a free one.

    `what` it is stands in messages; they are raised as `error`. `limits` keep clients from taking all of it.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        what: str,
        error: type[AgentLightningError],
        limits: ConnectionLimits | None = None,
    ):
        self._limits = limits or ConnectionLimits()
        self._said_full = -_SAY_AGAIN_SECONDS
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
            http=self._protocol,  # pyright: ignore[reportArgumentType]
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

    def _protocol(self, **named: Any) -> _Protocol:
        return _Protocol(self._limits, self._say_full, **named)

    def _say_full(self) -> None:
        """One line a minute, while connections are refused."""
        now = time.monotonic()
        if now - self._said_full >= _SAY_AGAIN_SECONDS:
            self._said_full = now
            logger.warning(
                "The %s's server has %d connections open, as many as it may: new ones are refused. If these are your "
                "own agents, raise the limit of open files (ulimit -n).",
                self._what,
                self._limits.connections,
            )

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
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        # asyncio's own loop sends without delay only where the protocol is said: else each answer waits for 40 ms.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 whose requests are never logged, whatever other servers of the process ask for: keys stand in URLs.

    A connection beyond the limit is refused, and one whose client does not finish the head of a request is closed.
    """

    def __init__(self, limits: ConnectionLimits, say_full: Callable[[], None], **named: Any) -> None:
        super().__init__(**named)
        self.access_log = False
        self._limits = limits
        self._say_full = say_full
        self._refused = False
        self._waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self._limits.connections:
            self._refused = True
            self._say_full()
            transport.write(_FULL)
            transport.close()
            return
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def eof_received(self) -> None:
        if not self._refused:
            super().eof_received()

    def on_message_begin(self) -> None:
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._heard()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._heard()
        self._waiting = self.loop.call_later(self._limits.header_seconds, self.transport.close)

    def _heard(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def _file_descriptors() -> int:
    """How many the process may have open."""
    try:
        import resource
    except ImportError:  # not on this system
        return 1024
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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
