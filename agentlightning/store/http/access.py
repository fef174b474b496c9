"""Who may call what: the admin key opens everything, an attempt's key only what an untrusted agent needs.

An ASGI middleware in front of `api`. Without an admin key everything is open, which a server allows on loopback only.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.keys import SPANS, TASK, AttemptKey, verify_attempt_key
from agentlightning.net.backoff import ObservedRequest
from agentlightning.net.server import Busy, asks_for_health
from agentlightning.store.http import wire
from agentlightning.store.http.api import answered
from agentlightning.store.http.intake import Intake
from agentlightning.store.http.problems import problem
from agentlightning.store.http.table import HttpOperation, find

OPEN_PATHS = (f"{wire.PREFIX}/health", "/docs", "/openapi.json")
MAX_BODY_BYTES = 16 * 2**20
"""Of a request with an attempt's key."""
MAX_HELD_BYTES = 64 * 2**20
"""Of all requests with the same attempt's key that are coming in or being answered."""
BODY_SECONDS = 60.0
"""How long a client with such a key may take for a body."""
_ONLY = {SPANS: "This key may not report spans.", TASK: "This key reads the task of its own rollout only."}
Take = Callable[[Request, bytes, AttemptKey], Awaitable[Response]]


class AccessControl:
    """Refuses what the key of a request does not open."""

    def __init__(self, app: ASGIApp, intake: Intake, admin_key: str, secret: bytes | None, busy: Busy):
        self._app = app
        self._intake = intake
        self._admin_key = admin_key.encode()
        self._secret = secret
        self._busy = busy
        self._held: Counter[Hashable] = Counter()
        """Bytes of each attempt's bodies that are here."""

    def trusts(self, scope: Scope) -> bool:
        """Whether a request comes with the admin key, or asks for health."""
        return asks_for_health(scope) or self._is_admin(_key_of(scope))

    def _is_admin(self, key: str) -> bool:
        return hmac.compare_digest(key.encode(), self._admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
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
        """What answers a request with an attempt's key."""
        operation, ids = find(request.method, request.scope["path"]) or (None, {})
        if (reason := refuse(key, operation, ids)) is not None:
            return problem(403, reason)
        takes = {"add_many_spans": self._intake.spans, "add_traces": self._intake.traces}
        take = takes.get(operation.name) if operation is not None else None
        return self._app if take is None else await answered(request, self._take(request, take, key))

    async def _take(self, request: Request, take: Take, key: AttemptKey) -> Response:
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
        if self._held[owner] > MAX_BODY_BYTES and sum(map(len, parts)) > MAX_BODY_BYTES:
            raise _Refused(413, f"The body has more than {MAX_BODY_BYTES >> 20} MiB; send smaller batches.")
        if self._held[owner] > MAX_HELD_BYTES:
            most = f"{MAX_HELD_BYTES >> 20} MiB"
            raise _Refused(429, f"This attempt's requests have more than {most} together. Try again.")


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _key_of(scope: Scope) -> str:
    return Headers(scope=scope).get("authorization", "").removeprefix("Bearer ").strip()


def refuse(key: AttemptKey, operation: HttpOperation | None, ids: Mapping[str, str]) -> str | None:
    """Why this attempt's key does not open an operation; None if it does."""
    if operation is None or operation.scope is None:
        return "This key belongs to one attempt; it reports spans and reads its own task, nothing else."
    if operation.scope in key.scopes and ids.get("rollout_id", key.rollout_id) == key.rollout_id:
        return None
    return _ONLY[operation.scope]
