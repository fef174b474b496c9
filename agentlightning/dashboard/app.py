"""The dashboard's requests: its pages under /dashboard, what they read under /dashboard/api, and who may look.

An ASGI application that a store's server puts in front of its own. Every answer forbids the browser whatever the pages
do not need; what agents and models said is only ever data in it.

On loopback whoever is on this machine may look, elsewhere whoever logged in with the store's key. A login is answered
with a cookie that scripts cannot read and other sites cannot send; keys never stand in URLs. Pages of other sites are
kept out by the `Guard` in front of every server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agentlightning.dashboard import groups, rollouts, runs, scores, tokens
from agentlightning.dashboard.curves import Curves
from agentlightning.dashboard.diagnoses import Diagnoses
from agentlightning.dashboard.news import News
from agentlightning.dashboard.texts import as_json
from agentlightning.errors import NotFoundError, StoreError
from agentlightning.net.guard import is_local_name
from agentlightning.store import LightningStoreServer
from agentlightning.store.http.server import DEFAULT_PORT, PAGES
from agentlightning.store.sql import SqlLightningStore

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
NONCE = "__NONCE__"
"""In the built page, where each answer puts a word of its own: styles that carry it are ours."""
MOST_LOGIN_BYTES = 4096
Answer = Callable[[SqlLightningStore, Request], Awaitable[Any]]

API: dict[str, Answer] = {
    "/runs": runs.listed,
    "/why": runs.diagnosis,
    "/runs/{run_id}": runs.one,
    "/runs/{run_id}/steps": runs.steps,
    "/runs/{run_id}/events": runs.events,
    "/runs/{run_id}/rewards": rollouts.rewards,
    "/rollouts": rollouts.listed,
    "/rollouts/count": rollouts.counted,
    "/rollouts/{rollout_id}": rollouts.one,
    "/rollouts/{rollout_id}/tokens": tokens.of_rollout,
    "/rollouts/{rollout_id}/scores": scores.of_rollout,
    "/rollouts/{rollout_id}/group": groups.of_rollout,
    "/resources": runs.resources,
    "/workers": runs.workers,
}
"""What can be read, and by which function."""


class Dashboard:
    """The pages of one store. `key` logs in where `loopback` is False; `live`: whether a run may be going on in it;
    `folder` holds other runs to compare with.
    """

    def __init__(
        self,
        store: SqlLightningStore,
        *,
        key: str | None,
        loopback: bool,
        live: bool = True,
        folder: Path | None = None,
    ) -> None:
        self._store = store
        self._loopback = loopback
        self._live = live
        self._access = _Access(key, loopback=loopback)
        self._news = News(store)
        self._app = Starlette(routes=self._routes())
        self._app.state.folder = folder
        self._app.state.curves = Curves(store)
        self._app.state.diagnoses = Diagnoses(store)
        self._app.state.scorer = scores.Scorer()
        self._app.state.live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def close(self) -> None:
        """Send open pages how things stand in the end; nothing is sent after that."""
        await self._news.close()

    def _routes(self) -> list[Route]:
        def reading(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                return await self._read(answer, request)

            return endpoint

        api = PAGES + "/api"
        return [
            Route("/", self._to_the_pages),
            Route(PAGES, self._to_the_pages),
            Route(f"{api}/session", self._session),
            Route(f"{api}/login", self._log_in, methods=["POST"]),
            Route(f"{api}/logout", self._log_out, methods=["POST"]),
            Route(f"{api}/news", self._tell_news),
            *(Route(api + path, reading(answer)) for path, answer in API.items()),
            Route(f"{api}/{{rest:path}}", self._unknown),
            Route(f"{PAGES}/assets/{{name}}", self._asset),
            Route(f"{PAGES}/{{rest:path}}", self._page),
        ]

    # ---- what is read ------------------------------------------------------------------------------------------------

    async def _read(self, answer: Answer, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        try:
            return _json(await answer(self._store, request))
        except NotFoundError as error:
            return _problem(404, str(error))
        except StoreError as error:
            return _problem(422, str(error))
        except Exception:  # a bug: the page gets an answer, the log the traceback
            logger.exception("The dashboard could not show %s", request.url.path)
            return _problem(500, "The dashboard failed here; the log of its server says why.")

    async def _tell_news(self, request: Request) -> Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        headers = {**_HEADERS, "cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._news.stream(), media_type="text/event-stream", headers=headers)

    async def _unknown(self, request: Request) -> Response:
        return self._refusal(request) or _problem(404, "There is nothing at this address of the dashboard.")

    def _refusal(self, request: Request) -> Response | None:
        if not self._access.allows(request):
            return _problem(401, "Log in with the store's key.")
        return None

    # ---- who reads ---------------------------------------------------------------------------------------------------

    async def _session(self, request: Request) -> Response:
        from agentlightning import __version__

        known = self._access.allows(request)
        return _json({"allowed": known, "can_log_out": not self._loopback, "live": self._live, "version": __version__})

    async def _log_in(self, request: Request) -> Response:
        try:
            body = b""
            async for part in request.stream():
                body += part
                if len(body) > MOST_LOGIN_BYTES:
                    return _problem(413, "This is no key.")
            key = msgspec.json.decode(body, type=dict[str, str])["key"]
        except (msgspec.MsgspecError, KeyError):
            return _problem(422, 'Send {"key": "…"}.')
        session = await self._access.log_in(key.strip())
        if session is None:
            return _problem(401, "This is not the store's key.")
        response = _json({"allowed": True})
        secure = request.url.scheme == "https"
        response.set_cookie(
            _COOKIE, session, int(_SESSION_SECONDS), path=PAGES, httponly=True, samesite="strict", secure=secure
        )
        return response

    async def _log_out(self, request: Request) -> Response:
        self._access.log_out(request)
        response = _json({"allowed": False})
        response.delete_cookie(_COOKIE, path=PAGES)
        return response

    # ---- the pages ---------------------------------------------------------------------------------------------------

    async def _to_the_pages(self, request: Request) -> Response:
        return RedirectResponse(f"{PAGES}/", status_code=307, headers=_HEADERS)

    async def _page(self, request: Request) -> Response:
        """Every address is the one page, which knows what to show there."""
        file = STATIC / "index.html"
        if not file.is_file():
            return _problem(404, "The dashboard's pages are not built: run `make dashboard` in the repository.")
        nonce = secrets.token_urlsafe(16)
        headers = {
            **_HEADERS,
            "cache-control": "no-store",
            "content-security-policy": _policy(nonce),
        }
        return Response(file.read_text(encoding="utf-8").replace(NONCE, nonce), media_type="text/html", headers=headers)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        file = STATIC / "assets" / name
        if name not in _assets():
            return _problem(404, "There is no such file of the dashboard.")
        headers = {**_HEADERS, "cache-control": "no-cache", "etag": f'"{_digest(file)}"'}
        if request.headers.get("if-none-match") == headers["etag"]:
            return Response(status_code=304, headers=headers)
        return FileResponse(file, headers=headers)


def _assets() -> set[str]:
    """The names of the files that the pages load."""
    return {file.name for file in (STATIC / "assets").glob("*")}


@cache
def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]


def _policy(nonce: str) -> str:
    return (
        "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:; font-src 'self'; "
        f"style-src 'self' 'nonce-{nonce}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}


def _json(value: Any, status: int = 200) -> Response:
    headers = {**_HEADERS, "cache-control": "no-store"}
    return Response(as_json(value), status_code=status, media_type="application/json", headers=headers)


def _problem(status: int, detail: str) -> Response:
    return _json({"status": status, "detail": detail}, status)


def served_with_dashboard(
    store: SqlLightningStore,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    *,
    admin_key: str | None = None,
    secret: bytes | None = None,
    live: bool = True,
    folder: Path | None = None,
    allow_hosts: Sequence[str] = (),
) -> LightningStoreServer:
    """A store's server, not yet started, that shows the dashboard too, at `dashboard_url`.

    On loopback it is open to whoever uses this machine; elsewhere one logs in with `admin_key`.
    """
    dashboard = Dashboard(store, key=admin_key, loopback=is_local_name(host), live=live, folder=folder)
    return LightningStoreServer(
        store, host, port, admin_key=admin_key, secret=secret, pages=dashboard, allow_hosts=allow_hosts
    )


def dashboard_url(endpoint: str) -> str:
    """Where a server at `endpoint` shows its dashboard."""
    return f"{endpoint}{PAGES}/"


_COOKIE = "agl_dashboard"
_SESSION_SECONDS = 7 * 86400.0
_MOST_SESSIONS = 1000
_PAUSE_SECONDS = 0.5
"""After a wrong key; wrong keys wait for each other, so that they cannot be tried quickly."""


class _Access:
    """Decides about requests; knows the sessions. `key` None: nobody can log in, which is for loopback only."""

    def __init__(self, key: str | None, *, loopback: bool) -> None:
        self._key = key
        self._loopback = loopback
        self._sessions: OrderedDict[str, float] = OrderedDict()
        self._wrong = asyncio.Lock()

    def allows(self, request: Request) -> bool:
        if self._loopback:
            return True
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if key and self._matches(key):
            return True
        ends = self._sessions.get(request.cookies.get(_COOKIE, ""))
        return ends is not None and ends > time.time()

    async def log_in(self, key: str) -> str | None:
        """A new session's cookie; None, after a while, for a wrong key."""
        if not self._matches(key):
            async with self._wrong:
                await asyncio.sleep(_PAUSE_SECONDS)
            return None
        session = secrets.token_urlsafe(32)
        self._sessions[session] = time.time() + _SESSION_SECONDS
        while len(self._sessions) > _MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def log_out(self, request: Request) -> None:
        self._sessions.pop(request.cookies.get(_COOKIE, ""), None)

    def _matches(self, key: str) -> bool:
        return self._key is not None and hmac.compare_digest(key.encode(), self._key.encode())
