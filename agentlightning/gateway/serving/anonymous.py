"""Anonymous access, for clients that belong to no rollout: each of their requests becomes an attempt of its own.

The requests of a session, which its program's header names, are one attempt (`sessions`). A request may go on from an
earlier answer by its id (`previous_response_id`, `item_reference`), for a while.

For serving models to anybody (`agl serve`, `agl gateway`). Who holds the key of an attempt is let through to it.
"""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from typing import Any, Protocol

from agentlightning.gateway.dialects import refused_in_shape
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.serving.agent_names import session_name
from agentlightning.gateway.serving.http import (
    KEY_HEADERS,
    Receive,
    Send,
    api_key,
    headers_of,
    send_body,
    with_request_id,
)
from agentlightning.gateway.serving.sessions import Sessions
from agentlightning.keys import PREFIX, not_empty
from agentlightning.rendering.messages import Message
from agentlightning.store.base import LightningStore


class AttemptGateway(Protocol):
    """What anonymous access needs of the gateway."""

    async def app(self, scope: Any, receive: Receive, send: Send) -> None: ...

    def key_for(self, rollout_id: str, attempt_id: str) -> str: ...

    def goes_on(self, rollout_id: str, attempt_id: str, answered: MutableMapping[str, list[Message]]) -> None: ...

    def answers(self, path: str, query: str) -> bool:
        """Whether calls of models are sent there."""
        ...

    async def close_attempt(self, rollout_id: str, attempt_id: str) -> Any: ...


class AnonymousAccess:
    """The ASGI application. With `api_key`, clients must send it as the clients of OpenAI, Anthropic or Google do."""

    def __init__(
        self,
        gateway: AttemptGateway,
        store: LightningStore,
        api_key: str | None,
        *,
        answers: RecentAnswers | None = None,
        sessions: Sessions | None = None,
    ) -> None:
        """
        answers: what requests may go on from; an hour's by default.
        sessions: those that are kept; none by default.
        """
        self._sessions = sessions or Sessions()
        self._answers = answers or RecentAnswers()
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
            await _refuse(scope, send)
            return
        if not self._gateway.answers(scope["path"], scope["query_string"].decode("latin-1")):
            await self._gateway.app(scope, receive, send)  # which says what there is: nothing is recorded
            return
        session = session_name(headers_of(scope))
        of_request = self._sessions.attempt(self._store, self._gateway.close_attempt, given, session, scope["path"])
        async with of_request as (rollout_id, attempt_id):
            self._gateway.goes_on(rollout_id, attempt_id, self._answers.of(given.encode()))
            key = self._gateway.key_for(rollout_id, attempt_id).encode()
            others = [(name, value) for name, value in scope["headers"] if name not in KEY_HEADERS]
            named = {**scope, "headers": [*others, (b"authorization", b"Bearer " + key)]}
            await self._gateway.app(named, receive, send)

    async def close(self) -> None:
        """End the attempts of all sessions."""
        await self._sessions.close(self._store, self._gateway.close_attempt)


async def _refuse(scope: Any, send: Send) -> None:
    refusal = Refusal(
        "This server needs its API key: give it to the client as api_key.",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )
    await send_body(with_request_id(send), 401, refused_in_shape(refusal, scope))
