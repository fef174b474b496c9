"""Who may call what: the admin key opens everything, an attempt's key only what an untrusted agent needs.

An ASGI middleware in front of `api`. Without an admin key everything is open, which a server allows on loopback only.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentlightning.errors import StoreError
from agentlightning.keys import REWARDS, SPANS, TASK, AttemptKey, verify_attempt_key
from agentlightning.store.http import otlp, size, wire
from agentlightning.store.http.api import problem
from agentlightning.types.names import CALL_ID, PARENT_CALL_ID, TRIPLET, TRIPLET_JSON

OPEN_PATHS = (f"{wire.PREFIX}/health", "/docs", "/openapi.json")
REWARD_PREFIX = "agentlightning.reward."
_SYSTEMS_OWN = (CALL_ID, PARENT_CALL_ID, TRIPLET_JSON)
"""Attributes by which the gateway and the runners say what is trained: never an agent's."""
MAX_BODY_BYTES = 16 * 2**20
"""Of a request with an attempt's key."""
_ROLLOUT = re.compile(rf"{wire.PREFIX}/rollouts/([^/]+)")


class AccessControl:
    """Refuses what the key of a request does not open."""

    def __init__(self, app: ASGIApp, admin_key: str, secret: bytes | None):
        self._app = app
        self._admin_key = admin_key.encode()
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if hmac.compare_digest(key.encode(), self._admin_key):
            await self._app(scope, receive, send)
            return
        attempt = verify_attempt_key(self._secret, key) if self._secret is not None else None
        if attempt is None:
            refusal = problem(
                401, "Send the store's key as 'Authorization: Bearer …' (LightningStoreClient(url, key=…))."
            )
            await refusal(scope, receive, send)
            return
        body = await _body(request)
        if body is None:
            reason = f"The body has more than {MAX_BODY_BYTES >> 20} MiB; send smaller batches."
            await problem(413, reason)(scope, receive, send)
            return
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


async def _body(request: Request) -> bytes | None:
    """The body, or None if it is too large to be read for somebody who is not trusted."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            return None
    return b"".join(parts)


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
