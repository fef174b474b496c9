"""Anonymous access, for clients that belong to no rollout: each of their requests becomes an attempt of its own.

The requests of a session, which its program's header names, are one attempt (`sessions`). A request may go on from an
earlier answer by its id (`previous_response_id`, `item_reference`), for a while: it belongs to the session of that one.

For serving models to anybody (`agl serve`, `agl gateway`). Who holds the key of an attempt is let through to it.
"""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from typing import Any, Protocol

from agentlightning.gateway.dialects import Dialect, refused_in_shape
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.limits import in_background
from agentlightning.gateway.serving.agent_names import session_name
from agentlightning.gateway.serving.ahead import ReadAhead, earlier_ids, replayed
from agentlightning.gateway.serving.http import (
    KEY_HEADERS,
    DisconnectedError,
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

    def opens(self, key: str) -> bool:
        """Whether it is the key of an attempt here."""
        ...

    def goes_on(self, rollout_id: str, attempt_id: str, answered: MutableMapping[str, list[Message]]) -> None: ...

    def dialect_of(self, path: str, query: str) -> Dialect | None:
        """The wire format of the calls that are sent there; None if none are."""
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
        self._ahead = ReadAhead()
        self._gateway = gateway
        self._store = store
        self._api_key = not_empty(api_key, "The key that clients must send (--api-key)")

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._gateway.app(scope, receive, send)
            return
        given = api_key(headers_of(scope))
        known = self._api_key is not None and hmac.compare_digest(given.encode(), self._api_key.encode())
        of_attempt = given.startswith(PREFIX) and (self._api_key is not None or self._gateway.opens(given))
        if of_attempt and not known:  # which the gateway checks; where any key is taken, a server's own begins alike
            await self._gateway.app(scope, receive, send)
            return
        if self._api_key is not None and not known:
            await _refuse(scope, send)
            return
        dialect = self._gateway.dialect_of(scope["path"], scope["query_string"].decode("latin-1"))
        if dialect is None:
            await self._gateway.app(scope, receive, send)  # which says what there is: nothing is recorded
            return
        name = session_name(headers_of(scope))
        if name is None and dialect.refers is not None:
            try:
                body = await self._ahead.read(given.encode(), headers_of(scope), receive)
            except Refusal as refusal:
                await send_body(with_request_id(send), refusal.status, dialect.refuse(refusal))
                return
            except DisconnectedError:
                return
            if body is not None:
                receive = replayed(body, receive)
                name = await self._continued(given.encode(), dialect, body)
        await self._answer(given, name, scope, receive, send)

    async def _continued(self, client: bytes, dialect: Dialect, body: bytes) -> str | None:
        """The session of the answer that a request goes on from."""
        answers = self._answers.of(client)
        work = earlier_ids, dialect, body
        ids = await in_background(*work) if self._ahead.limits.is_large(body) else earlier_ids(dialect, body)
        return next((found for found in map(answers.session, ids) if found), None)

    async def _answer(self, client: str, name: str | None, scope: Any, receive: Receive, send: Send) -> None:
        of_request = self._sessions.attempt(self._store, self._gateway.close_attempt, client, name, scope["path"])
        async with of_request as (session, (rollout_id, attempt_id)):
            answered = self._answers.of(client.encode(), session.name)
            self._gateway.goes_on(rollout_id, attempt_id, answered)
            key = self._gateway.key_for(rollout_id, attempt_id).encode()
            others = [(name, value) for name, value in scope["headers"] if name not in KEY_HEADERS]
            named = {**scope, "headers": [*others, (b"authorization", b"Bearer " + key)]}
            try:
                await self._gateway.app(named, receive, send)
            finally:
                session.kept = session.kept or answered.grew

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
