"""A uvicorn server inside the caller's event loop: its socket is bound first, it leaves signals alone, and it is ready
when `start` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentlightning.arguments import explained_class
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.net.descriptors import file_descriptors, raise_file_limit
from agentlightning.net.guard import Guard

logger = logging.getLogger(__name__)

GRACE_SECONDS = 3
_FILES = 256
"""File descriptors that connections leave to files, pipes and other servers, the store's before all."""
_MOST_CONNECTIONS = 2**13
_HEAD_BYTES = 2**16
"""Of a request: its address and its headers; and what may stand in a row between and behind pieces of its body."""
_SAY_AGAIN_SECONDS = 60.0
_ALIVE = {"TCP_KEEPIDLE": 6, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}
"""After so many quiet seconds a client's system is asked whether the connection is there, so often, so many times."""
_TICK_SECONDS = 1.0
_LOOK_SECONDS = 0.005
"""How often a server that ends looks whether its connections have ended."""
_TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@explained_class
@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """What clients may take of a server. Where all connections are taken, another one ends that which has waited for
    its client longest, and is refused with 503 if there is none.
    """

    header_seconds: float = 30.0
    """How long a client may take for the head of a request, from its first byte on, or from when it connects."""
    body_seconds: float = 120.0
    """How long it may take for the body."""
    most: int | None = None
    """Connections at the same time; None for 8,192, or three quarters of the process's file descriptors less 256 (or
    a quarter of them, if that is more) if those are fewer."""
    reserve: int = 32
    """How many of them, at most a quarter, are for requests with the admin key, those of runners, and `/health`."""
    per_key: int | None = None
    """Connections on which requests with the key of one attempt may be under way; None for half of those that are not
    reserved. Another one is refused with 429."""

    def __post_init__(self) -> None:
        for name in ("header_seconds", "body_seconds", "most", "per_key"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}.")
        if self.reserve < 0:
            raise ConfigError(f"reserve must be 0 or more, not {self.reserve}.")

    @property
    def connections(self) -> int:
        files = file_descriptors()
        return self.most or max(8, min(_MOST_CONNECTIONS, max((files - _FILES) * 3 // 4, files // 4)))

    @property
    def unreserved(self) -> int:
        """How many of them anybody may have."""
        return self.connections - min(self.reserve, self.connections // 4)

    @property
    def of_one_key(self) -> int:
        return self.per_key or max(1, self.unreserved // 2)


class Busy:
    """The requests with the key of each attempt that are under way, from their heads on to the ends of the answers."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.most = limits.of_one_key
        self._count: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def one(self, owner: Hashable) -> Iterator[bool]:
        """Count one more in this context; False if the owner has as many as it may."""
        fits = self._count[owner] < self.most
        self._count[owner] += 1
        try:
            yield fits
        finally:
            self._count[owner] -= 1
            if not self._count[owner]:
                del self._count[owner]

    @property
    def refusal(self) -> str:
        return f"This key has requests open on {self.most} connections, as many as it may (per_key). Try again."


def asks_for_health(scope: Mapping[str, Any]) -> bool:
    """Whether a request only asks whether the server is well."""
    return scope["path"].endswith("/health")


class LoopServer:
    """Serves an ASGI application on `host:port`; port 0 takes a free one.

    `what` it is stands in messages; they are raised as `error`. `limits` keep clients from taking all of it; requests
    that are `trusted` may have the connections in reserve. A `Guard` keeps web pages of others out; `allow_hosts` are
    names of this server that it cannot know. `forms`: whether it takes multipart forms, as uploads have them.
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
        trusted: Callable[[Scope], bool] = asks_for_health,
        allow_hosts: Sequence[str] = (),
        forms: bool = False,
    ):
        self._limits = limits or ConnectionLimits()
        self._trusted = trusted
        self._idle: OrderedDict[_Protocol, None] = OrderedDict()
        self._reported_full = -_SAY_AGAIN_SECONDS
        self._app = Guard(app, host, allow_hosts, forms=forms)
        self._what = what
        self._error = error
        self.host = host
        self.port = port
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        raise_file_limit()
        listening = self._bind()
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(
            self._until_stopped,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            http=self._protocol,  # pyright: ignore[reportArgumentType]
            ws="none",
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
        return _Protocol(self._limits, self._idle, self._full, self._for_trusted, **named)

    async def _for_trusted(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, on a connection in reserve."""
        if self._trusted(scope):
            await self._until_stopped(scope, receive, send)
            return
        self._full()
        headers = [(b"retry-after", b"1"), (b"content-length", b"0"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _full(self) -> None:
        """Say, once a minute, that connections are refused."""
        now = time.monotonic()
        if now - self._reported_full >= _SAY_AGAIN_SECONDS:
            self._reported_full = now
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
        self._server.exit()
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
        return _bound(self._what, self.host, self.port, self._error)


def check_port(what: str, host: str, port: int | None, error: type[AgentLightningError]) -> None:
    """Raises `error` for a port that cannot be listened on, before what will listen there is ready."""
    if port:
        _bound(what, host, port, error).close()


def _bound(what: str, host: str, port: int, error: type[AgentLightningError]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio's own loop sends without delay only where the protocol is named: else each answer waits for 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it: a client whose machine vanishes without a word is gone after a quarter of a minute.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE.items():
        if hasattr(socket, name):  # not on every system
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as failure:  # the latter for a port that no port can be
        listening.close()
        why = failure.strerror if isinstance(failure, OSError) else str(failure).rstrip(".")
        raise error(
            f"The {what} cannot listen on {host}:{port}: {why or failure}. "
            "Give another port, or port 0 to take a free one."
        ) from failure
    listening.setblocking(False)
    return listening


class _Protocol(HttpToolsProtocol):
    """HTTP/1.1 whose requests are never logged, whatever other servers of the process ask for: keys stand in URLs.

    A connection beyond the limit is refused, and one whose client does not finish a request is closed. `idle` are those
    that wait for their clients, the longest first.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        idle: OrderedDict[_Protocol, None],
        full: Callable[[], None],
        for_trusted: ASGIApp,
        **named: Any,
    ) -> None:
        super().__init__(**named)
        self.access_log = False
        self._limits = limits
        self._idle = idle
        self._full = full
        self._for_trusted = for_trusted
        self._refused = False
        self._head_bytes = 0
        """Of the request whose head is coming in, or of what came after the last piece of its body."""
        self._in_body = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= self._limits.unreserved and self._idle:
            self._idle.popitem(last=False)[0].end()
        if len(self.connections) >= self._limits.connections:
            self._full()
            self._refuse(transport, _FULL)
            return
        if len(self.connections) >= self._limits.unreserved:
            self.app = self._for_trusted  # pyright: ignore[reportAttributeAccessIssue]
        super().connection_made(transport)
        self._idle[self] = None
        self._wait(self._limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._idle.pop(self, None)
        if self.transport is not None:  # it was not refused at once
            super().connection_lost(exc)

    def end(self) -> None:
        """Close it for another one."""
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD_BYTES:
            self._refuse(self.transport, _TOO_LONG)

    def eof_received(self) -> None:
        if not self._refused:
            super().eof_received()

    def on_message_begin(self) -> None:
        self._wait(self._limits.header_seconds)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes, self._in_body = 0, True
        self._wait(self._limits.body_seconds)
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # or it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes, self._in_body = 0, False
        if self.cycle.response_complete:  # it was refused before its body was there
            self._wait(self._limits.header_seconds)
        else:
            self._cancel_timer()
            self._idle.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        goes_on = bool(self.pipeline)
        super().on_response_complete()
        if not goes_on and not self.transport.is_closing():
            self._idle.setdefault(self)

    def _refuse(self, transport: Any, answer: bytes) -> None:
        self._refused = True
        transport.write(answer)
        transport.close()

    def _wait(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self.transport.close)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config):
        super().__init__(config)
        self.ready = asyncio.Event()
        self._exiting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    def exit(self) -> None:
        self.should_exit = True
        self._exiting.set()

    async def main_loop(self) -> None:
        """As uvicorn's, which would see only at its next tick that it is to end."""
        while not await self.on_tick(0):  # writes the date of the answers' heads
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._exiting.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, without its pauses of a tenth of a second."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while True:
                    for connection in list(self.server_state.connections):
                        connection.shutdown()
                    await asyncio.sleep(_LOOK_SECONDS)  # also for one that was accepted just now
                    if not (self.server_state.connections or self.server_state.tasks):
                        break
                for listening in self.servers:
                    await listening.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel(msg="The server ends.")

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the program that embeds this server."""
        yield
