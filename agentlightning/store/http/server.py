"""Serving a store to other processes, which use it through `LightningStoreClient(server.endpoint)`, and who may call
what: the admin key opens everything, an attempt's key only what an untrusted agent needs. Without an admin key
everything is open, which a server allows on loopback only.

The server owns its socket, not the store: closing that is the caller's business.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.arguments import explained
from agentlightning.errors import ConfigError, StoreError
from agentlightning.keys import SECRET, SPANS, TASK, AttemptKey, not_empty, sign_attempt_key, verify_attempt_key
from agentlightning.net.backoff import ObservedRequest
from agentlightning.net.guard import is_local_name
from agentlightning.net.server import Busy, ConnectionLimits, LoopServer, asks_for_health
from agentlightning.store.http import wire
from agentlightning.store.http.api import Attendance, StoreApi, answered
from agentlightning.store.http.intake import Intake
from agentlightning.store.http.problems import problem
from agentlightning.store.http.table import HttpOperation, find
from agentlightning.store.http.wire import OTLP_PATH
from agentlightning.store.sql import SqlLightningStore

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4747
PAGES = "/dashboard"


class Pages(Protocol):
    """An ASGI application that shows a store to people."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None:
        """End the answers that do not end by themselves."""
        ...


class LightningStoreServer:
    """A store over HTTP, on the event loop that starts it.

    `admin_key` opens everything. With a `secret`, `key_for` makes keys that open one attempt only, to be given to
    agents that are not trusted. Addresses other than loopback need an `admin_key`. `pages` answers `/` and what is
    under `/dashboard`, and decides itself who may see it. `connection_limits`: how long clients may take for their
    requests, and how many may be connected. `allow_hosts`: names of this server that it cannot know, as those that a
    proxy is asked by.
    """

    @explained
    def __init__(
        self,
        store: SqlLightningStore,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        *,
        admin_key: str | None = None,
        secret: bytes | None = None,
        pages: Pages | None = None,
        connection_limits: ConnectionLimits | None = None,
        allow_hosts: Sequence[str] = (),
    ):
        not_empty(admin_key, "The store's admin key (agl store --key)")
        not_empty(secret, SECRET)
        if admin_key is None and not is_local_name(host):
            raise ConfigError(
                f"Serving the store on {host} lets everybody on that network read and write it. Give an admin_key "
                "(--key on the command line), or serve on 127.0.0.1."
            )
        if admin_key is None and secret is not None:
            raise ConfigError("Keys for attempts mean nothing on an open server; give an admin_key too.")
        self.store = store
        self.admin_key = admin_key
        self._secret = secret
        self._intake = Intake(store)
        self._attendance = Attendance(store)
        app: ASGIApp = StoreApi(store, self._intake, self._attendance)
        limits, trusted = connection_limits or ConnectionLimits(), asks_for_health
        if admin_key is not None:
            app = control = _AccessControl(app, self._intake, admin_key, secret, Busy(limits))
            trusted = control.trusts
        self._pages = pages
        if pages is not None:
            app = _with_pages(pages, app)
        named = {"what": "store", "error": StoreError, "limits": limits, "trusted": trusted}
        self._server = LoopServer(app, host, port, **named, allow_hosts=allow_hosts)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.port

    @property
    def endpoint(self) -> str:
        """The URL for `LightningStoreClient`."""
        host = self._server.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def otlp_traces_endpoint(self) -> str:
        """The URL for OpenTelemetry exporters."""
        return self.endpoint + OTLP_PATH

    def key_for(self, rollout_id: str, attempt_id: str, scopes: tuple[str, ...]) -> str:
        """A key that opens one attempt only; see `agentlightning.keys` for the scopes."""
        if self._secret is None:
            raise ConfigError("Give the server a secret to make keys for attempts.")
        return sign_attempt_key(self._secret, rollout_id, attempt_id, scopes)

    async def start(self) -> None:
        """Listen. Raises `StoreError` if the port is taken."""
        await self._server.start()
        logger.info("The store is served at %s", self.endpoint)

    async def run_forever(self) -> None:
        """Start and serve until cancelled or stopped."""
        await self.start()
        try:
            await self._server.serve()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop listening. Idempotent; the store stays open."""
        if self._pages is not None:
            await self._pages.close()
        await self._attendance.close()
        await self._server.stop()
        await self._intake.close()


def _with_pages(pages: Pages, api: ASGIApp) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        of_pages = path in ("/", PAGES) or path.startswith(f"{PAGES}/")
        await (pages if of_pages else api)(scope, receive, send)

    return app


_OPEN_PATHS = (f"{wire.PREFIX}/health", "/docs", "/openapi.json")
_MAX_BODY_BYTES = 16 * 2**20
"""The largest body of a request with an attempt's key."""
MAX_HELD_BYTES = 64 * 2**20
"""The most that all requests with one attempt's key may hold while they come in or are answered."""
BODY_SECONDS = 60.0
"""How long a client with such a key may take to send a body."""
_ONLY = {SPANS: "This key may not report spans.", TASK: "This key reads the task of its own rollout only."}
_Take = Callable[[Request, bytes, AttemptKey], Awaitable[Response]]


class _AccessControl:
    """An ASGI middleware in front of the API, which refuses what the key of a request does not open."""

    def __init__(self, app: ASGIApp, intake: Intake, admin_key: str, secret: bytes | None, busy: Busy):
        self._app = app
        self._intake = intake
        self._admin_key = admin_key.encode()
        self._secret = secret
        self._busy = busy
        self._held: Counter[Hashable] = Counter()
        """The bytes that are held of each attempt's bodies."""

    def trusts(self, scope: Scope) -> bool:
        """Whether a request comes with the admin key, or asks for health."""
        return asks_for_health(scope) or self._is_admin(_key_of(scope))

    def _is_admin(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = _key_of(scope)
        if self._is_admin(key):
            await self._app(scope, receive, send)
            return
        attempt = verify_attempt_key(self._secret, key) if self._secret is not None else None
        if attempt is None:
            refusal = problem(
                401, "Send the store's key as 'Authorization: Bearer …' (LightningStoreClient(url, key=…))."
            )
            await refusal(scope, receive, send)
            return
        owner, watched = (attempt.rollout_id, attempt.attempt_id), ObservedRequest(receive, send)
        with self._busy.one(owner) as fits:
            late = await self._intake.backoff.wait(watched, owner, BODY_SECONDS) if fits else self._busy.refusal
            try:
                request = Request(scope, watched.receive)
                app = await self._opened_by(attempt, request) if late is None else problem(429, late)
                await app(scope, watched.receive, watched.send)
            finally:
                self._intake.backoff.settle(watched)

    async def _opened_by(self, key: AttemptKey, request: Request) -> ASGIApp:
        """The application that answers a request with an attempt's key."""
        operation, ids = find(request.method, request.scope["path"]) or (None, {})
        if (reason := _refuse(key, operation, ids)) is not None:
            return problem(403, reason)
        takes = {"add_many_spans": self._intake.spans, "add_traces": self._intake.traces}
        take = takes.get(operation.name) if operation is not None else None
        return self._app if take is None else await answered(request, self._take(request, take, key))

    async def _take(self, request: Request, take: _Take, key: AttemptKey) -> Response:
        try:
            async with self._body((key.rollout_id, key.attempt_id), request) as body:
                return await take(request, body, key)
        except _Refused as refused:
            return problem(refused.status, str(refused))

    @asynccontextmanager
    async def _body(self, owner: Hashable, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts as held until this context ends. Raises `_Refused`."""
        parts: list[bytes] = []
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    async for part in request.stream():
                        parts.append(part)
                        self._held[owner] += len(part)
                        self._check(owner, parts)
            except TimeoutError:
                raise _Refused(408, f"The body did not come within {BODY_SECONDS:g} seconds.") from None
            yield b"".join(parts)
        finally:
            self._held[owner] -= sum(map(len, parts))
            if not self._held[owner]:
                del self._held[owner]

    def _check(self, owner: Hashable, parts: Sequence[bytes]) -> None:
        if self._held[owner] > _MAX_BODY_BYTES and sum(map(len, parts)) > _MAX_BODY_BYTES:
            raise _Refused(413, f"The body has more than {_MAX_BODY_BYTES >> 20} MiB; send smaller batches.")
        if self._held[owner] > MAX_HELD_BYTES:
            most = f"{MAX_HELD_BYTES >> 20} MiB"
            raise _Refused(429, f"This attempt's requests have more than {most} together. Try again.")


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _key_of(scope: Scope) -> str:
    return Headers(scope=scope).get("authorization", "").removeprefix("Bearer ").strip()


def _refuse(key: AttemptKey, operation: HttpOperation | None, ids: Mapping[str, str]) -> str | None:
    """Why this attempt's key does not open an operation; None if it does."""
    if operation is None or operation.scope is None:
        return "This key belongs to one attempt; it reports spans and reads its own task, nothing else."
    if operation.scope in key.scopes and ids.get("rollout_id", key.rollout_id) == key.rollout_id:
        return None
    return _ONLY[operation.scope]
