"""Serving a store to other processes, which use it through `LightningStoreClient(server.endpoint)`.

The server owns its socket, not the store: closing that is the caller's business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.arguments import explained
from agentlightning.errors import ConfigError, StoreError
from agentlightning.keys import SECRET, not_empty, sign_attempt_key
from agentlightning.net.guard import is_local_name
from agentlightning.net.server import Busy, ConnectionLimits, LoopServer, asks_for_health
from agentlightning.store.http.access import AccessControl
from agentlightning.store.http.api import StoreApi
from agentlightning.store.http.attendance import Attendance
from agentlightning.store.http.intake import Intake
from agentlightning.store.http.wire import OTLP_PATH
from agentlightning.store.sql import SqlLightningStore

logger = logging.getLogger(__name__)

DEFAULT_PORT = 4747
PAGES = "/dashboard"


class Pages(Protocol):
    """What people see of a store: an ASGI application."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def close(self) -> None:
        """End the answers that have no end of their own."""
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
            app = control = AccessControl(app, self._intake, admin_key, secret, Busy(limits))
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
