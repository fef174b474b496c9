"""Anonymous access, for clients that belong to no rollout: each of their requests becomes an attempt of its own.

For serving models to anybody (`agl serve`, `agl gateway`). Who holds the key of an attempt is let through to it.
"""

from __future__ import annotations

import hmac
from typing import Any, Protocol

import msgspec

from agentlightning.gateway.serving.http import KEY_HEADERS, Receive, Send, api_key, headers_of
from agentlightning.keys import PREFIX, not_empty
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptStatus, Outcome, RolloutMode


class AttemptGateway(Protocol):
    """What anonymous access needs of the gateway."""

    async def app(self, scope: Any, receive: Receive, send: Send) -> None: ...

    def key_for(self, rollout_id: str, attempt_id: str) -> str: ...

    async def close_attempt(self, rollout_id: str, attempt_id: str) -> Any: ...


class AnonymousAccess:
    """The ASGI application. With `api_key`, clients must send it as the clients of OpenAI, Anthropic or Google do."""

    def __init__(self, gateway: AttemptGateway, store: LightningStore, api_key: str | None) -> None:
        self._gateway = gateway
        self._store = store
        self._api_key = not_empty(api_key, "The key that clients must send (--api-key)")

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._gateway.app(scope, receive, send)
            return
        given = api_key(headers_of(scope))
        if given.startswith(PREFIX):  # an attempt's key, which the gateway checks
            await self._gateway.app(scope, receive, send)
            return
        if self._api_key is not None and not hmac.compare_digest(given.encode(), self._api_key.encode()):
            await _refuse(send)
            return
        claimed = await self._store.start_rollout({"path": scope["path"]}, RolloutMode.TEST)
        rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
        key = self._gateway.key_for(rollout_id, attempt_id).encode()
        others = [(name, value) for name, value in scope["headers"] if name not in KEY_HEADERS]
        try:
            named = {**scope, "headers": [*others, (b"authorization", b"Bearer " + key)]}
            await self._gateway.app(named, receive, send)
        finally:
            await self._gateway.close_attempt(rollout_id, attempt_id)
            await self._store.update_attempt(rollout_id, attempt_id, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)


async def _refuse(send: Send) -> None:
    message = "This server needs its API key: give it to the client as api_key."
    error = {"message": message, "type": "authentication_error", "param": None, "code": "invalid_api_key"}
    body = msgspec.json.encode({"error": error})
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
