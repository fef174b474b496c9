"""Who may call what: the admin key opens everything, an attempt's key only what an untrusted agent needs.

An ASGI middleware in front of `api`. Without an admin key everything is open, which a server allows on loopback only.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.errors import StoreError
from agentlightning.keys import REWARDS, SPANS, TASK, AttemptKey, verify_attempt_key
from agentlightning.serving import Busy, asks_for_health
from agentlightning.store.http import otlp, size, wire
from agentlightning.store.http.api import problem
from agentlightning.types.names import CALL_ID, PARENT_CALL_ID, TRIPLET, TRIPLET_JSON

OPEN_PATHS = (f"{wire.PREFIX}/health", "/docs", "/openapi.json")
REWARD_PREFIX = "agentlightning.reward."
_SYSTEMS_OWN = (CALL_ID, PARENT_CALL_ID, TRIPLET_JSON)
"""Attributes by which the gateway and the runners say what is trained: never an agent's."""
MAX_BODY_BYTES = 16 * 2**20
"""Of a request with an attempt's key."""
MAX_HELD_BYTES = 64 * 2**20
"""Of all requests with the same attempt's key that are coming in or being answered."""
BODY_SECONDS = 60.0
"""How long a client with such a key may take for a body."""
_ROLLOUT = re.compile(rf"{wire.PREFIX}/rollouts/([^/]+)")


class AccessControl:
    """Refuses what the key of a request does not open."""

    def __init__(self, app: ASGIApp, admin_key: str, secret: bytes | None, busy: Busy):
        self._app = app
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
        owner = attempt.rollout_id, attempt.attempt_id
        with self._busy.one(owner) as fits:
            if not fits:
                await problem(429, self._busy.refusal)(scope, receive, send)
                return
            try:
                async with self._body(owner, Request(scope, receive)) as body:
                    await self._answer(attempt, body, scope, receive, send)
            except _Refused as refused:
                await problem(refused.status, str(refused))(scope, receive, send)
            except ClientDisconnect:
                pass

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

    async def _answer(self, attempt: AttemptKey, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            # In a thread if it may take long, so that others do not wait for what one agent sends.
            small = len(body) <= otlp.SMALL_BYTES and "content-encoding" not in request.headers
            reason = (
                refuse(attempt, request, body) if small else await asyncio.to_thread(refuse, attempt, request, body)
            )
        except size.TooMuch as error:
            await problem(413, str(error))(scope, receive, send)
            return
        except StoreError as error:
            reason = str(error)
        if reason is not None:
            await problem(403, reason)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)


class _Refused(Exception):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


def _key_of(scope: Scope) -> str:
    return Headers(scope=scope).get("authorization", "").removeprefix("Bearer ").strip()


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body was read to judge it; the application reads it again."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def refuse(key: AttemptKey, request: Request, body: bytes) -> str | None:
    """Why this attempt's key does not open this request; None if it does."""
    method, path = request.method, request.url.path
    if method == "GET" and (found := _ROLLOUT.fullmatch(path)) is not None:
        if TASK not in key.scopes or found[1] != key.rollout_id:
            return "This key reads the task of its own rollout only."
        return None
    if method == "POST" and path == f"{wire.PREFIX}/spans":
        return _refuse_spans(key, _json_spans(body))
    if method == "POST" and path == wire.OTLP_PATH:
        return _refuse_spans(key, _otlp_spans(request, body))
    return "This key belongs to one attempt; it reports spans and reads its own task, nothing else."


def _json_spans(body: bytes) -> list[dict[str, Any]]:
    size.check_json(body)
    try:
        spans = msgspec.json.decode(body, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise StoreError(f"The body is not a list of spans: {error}.") from error
    if len(spans) > size.MAX_SPANS:
        raise size.too_many("spans", size.MAX_SPANS)
    return spans


def _otlp_spans(request: Request, body: bytes) -> Iterable[dict[str, Any]]:
    for span in otlp.to_spans(otlp.parse(request.headers, body)):
        # A span that does not say whose it is is rejected later on, with the reason.
        if not isinstance(span, str):
            yield {name: getattr(span, name) for name in ("rollout_id", "attempt_id", "name", "attributes")}


def _refuse_spans(key: AttemptKey, spans: Iterable[dict[str, Any]]) -> str | None:
    if SPANS not in key.scopes:
        return "This key may not report spans."
    for span in spans:
        if (span.get("rollout_id"), span.get("attempt_id")) != (key.rollout_id, key.attempt_id):
            return "This key reports spans of its own attempt only."
        attributes = span.get("attributes")
        names = list(attributes) if isinstance(attributes, dict) else []
        if span.get("name") == TRIPLET or any(name in names for name in _SYSTEMS_OWN):
            return "What is trained is not said by spans of an agent."
        if REWARDS not in key.scopes and any(name.startswith(REWARD_PREFIX) for name in names):
            return "This key may not write rewards: a grader gives them here."
    return None
