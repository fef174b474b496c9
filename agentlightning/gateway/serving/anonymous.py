"""Anonymous access, for clients that belong to no rollout (`agl serve`, `agl gateway`): each request becomes an attempt
of its own, or all requests of a session are one. A client with the key of an attempt is let through to that.

A session is named by its program's header (`agent_names.session_name`), or made of a chain of answers of which each
request names an earlier one by its id (`previous_response_id`, `item_reference`); bodies are read ahead for those ids,
before it is known whose they are. The requests of a session are calls of one attempt, so that each goes on from the
tokens that were sampled before it. A client with another key has another session of the same name. An attempt ends when
its session was not used for a while, when there are too many, or with the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from agentlightning.errors import AgentLightningError
from agentlightning.gateway.dialects import Dialect, refused_in_shape
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.answers import RecentAnswers
from agentlightning.gateway.limits import RequestLimits, Waiting, in_background
from agentlightning.gateway.serving.agent_names import session_name
from agentlightning.gateway.serving.http import (
    KEY_HEADERS,
    DisconnectedError,
    Receive,
    Send,
    api_key,
    headers_of,
    read_body,
    send_body,
    with_request_id,
)
from agentlightning.keys import PREFIX, not_empty
from agentlightning.rendering.messages import Message
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout, AttemptStatus, Outcome, RolloutMode

logger = logging.getLogger(__name__)


class AttemptGateway(Protocol):
    """What anonymous access needs of the gateway."""

    async def app(self, scope: Any, receive: Receive, send: Send) -> None: ...

    def key_for(self, rollout_id: str, attempt_id: str) -> str: ...

    def opens(self, key: str) -> bool:
        """Whether this is the key of an attempt here."""
        ...

    def goes_on(self, rollout_id: str, attempt_id: str, answered: MutableMapping[str, list[Message]]) -> None: ...

    def dialect_of(self, path: str, query: str) -> Dialect | None:
        """The wire format of the calls at this path; None if it takes no calls."""
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
        answers: The answers that requests may go on from; those of the last hour by default.
        sessions: How sessions are kept; by default they are not.
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
            await self._gateway.app(scope, receive, send)  # which answers with what there is; nothing is recorded
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
        work = _earlier_ids, dialect, body
        ids = await in_background(*work) if self._ahead.limits.is_large(body) else _earlier_ids(dialect, body)
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


_MOST_SESSIONS = 1000
"""Sessions that are kept without a request."""
_OVER = (AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.TIMEOUT)

_Ids = tuple[str, str]
"""The ids of a rollout and its attempt."""
_End = Callable[[str, str], Awaitable[object]]


@dataclass(eq=False)
class NamedSession:
    """A session, with its attempt once it has one."""

    name: str
    kept: bool
    """Whether another request may come."""
    ids: _Ids | None = None
    requests: int = 0
    used: float = 0.0
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Sessions:
    """The open sessions. `seconds`: how long one is kept that is not used; 0: each request is an attempt of its own.
    `ended` is called with the id of each rollout that is over.
    """

    def __init__(
        self,
        seconds: float = 0.0,
        *,
        most: int = _MOST_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
        ended: Callable[[str], Awaitable[object]] | None = None,
    ) -> None:
        self._seconds = seconds
        self._ended = ended
        self._most = most
        self._clock = clock
        self._open: OrderedDict[bytes, NamedSession] = OrderedDict()
        self._sweeping: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def attempt(
        self, store: LightningStore, end: _End, client: str, session: str | None, path: str
    ) -> AsyncIterator[tuple[NamedSession, _Ids]]:
        """The session of a request, a new one without a name, and its attempt. The attempt ends here, at the gateway by
        `end`, unless the session has a name or is `kept` because an answer was added to it.
        """
        name = session or uuid.uuid4().hex
        key = hashlib.blake2b(f"{client}\0{name}".encode()).digest()
        if not self._seconds:
            name, key = "", uuid.uuid4().bytes
        found = self._open.setdefault(key, NamedSession(name, kept=session is not None))
        self._open.move_to_end(key)
        found.requests += 1
        try:
            async with found.starting:
                if found.ids is None or not await _goes_on(store, found.ids):
                    found.ids = await _start(store, path)
            yield found, found.ids
        finally:
            found.requests -= 1
            found.used = self._clock()
            if not self._seconds or not found.kept:
                if key in self._open:  # else the server is being closed, which ends it
                    await asyncio.shield(self._finish(store, end, key))
            elif self._sweeping is None or self._sweeping.done():
                self._sweeping = asyncio.create_task(self._sweep(store, end))

    async def close(self, store: LightningStore, end: _End) -> None:
        """End the attempts of all sessions."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._sweeping
        for key in list(self._open):
            self._finish(store, end, key)
        await asyncio.gather(*self._ending)

    async def _sweep(self, store: LightningStore, end: _End) -> None:
        """End what was not used for long, and the oldest ones of too many, as long as there is a session."""
        while self._open:
            now = self._clock()
            idle = [(key, one) for key, one in self._open.items() if not one.requests]
            old = [key for key, one in idle if now - one.used >= self._seconds]
            for key in [*old, *(key for key, _ in idle[len(old) : len(idle) - self._most])]:
                await asyncio.shield(self._finish(store, end, key))
            await asyncio.sleep(min(self._seconds, 10.0))

    def _finish(self, store: LightningStore, end: _End, key: bytes) -> asyncio.Task[None]:
        """End the attempt of a session, to its end even if the server stops meanwhile."""
        ending = asyncio.create_task(self._end_if_begun(store, end, self._open.pop(key).ids))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def _end_if_begun(self, store: LightningStore, end: _End, ids: _Ids | None) -> None:
        try:
            if ids is not None:
                await _end(store, end, ids)
                if self._ended is not None:
                    await self._ended(ids[0])
        except AgentLightningError as error:  # the other sessions are ended all the same
            logger.warning("The attempt of a session could not be ended: %s", error)


async def _start(store: LightningStore, path: str) -> _Ids:
    claimed = await store.start_rollout({"path": path}, RolloutMode.TEST)
    return claimed.rollout_id, claimed.attempt.attempt_id


async def _goes_on(store: LightningStore, ids: _Ids) -> bool:
    """Whether an attempt is still open in the store."""
    rollout = await store.get_rollout_by_id(ids[0])
    if not isinstance(rollout, AttemptedRollout) or rollout.attempt.attempt_id != ids[1]:
        return False
    return rollout.attempt.status not in _OVER


async def _end(store: LightningStore, end: _End, ids: _Ids) -> None:
    await end(*ids)
    await store.update_attempt(*ids, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)


_BODY_SECONDS = 60.0
_MOST_IDS = 1000


class ReadAhead:
    """Reads bodies within the limits that the gateway has for them."""

    def __init__(self) -> None:
        self.limits = RequestLimits()
        self._waiting = Waiting(self.limits)

    async def read(self, client: bytes, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The body; None for a request whose own length is too large, which the gateway refuses. Raises `Refusal`."""
        try:
            self.limits.check_length(headers.get(b"content-length"))
        except Refusal:
            return None
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._waiting.hold(client, size)
            held += size

        try:
            return await read_body(receive, _BODY_SECONDS, self.limits, headers.get(b"content-length"), hold)
        finally:
            self._waiting.release(client, held)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Gives out a body that was read as if it came now, and then what comes after it."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return parts.pop() if parts else await receive()

    return again


def _earlier_ids(dialect: Dialect, body: bytes) -> list[str]:
    """The ids of answers that a body may refer to: the one that the whole request continues first, then the latest."""
    assert dialect.refers is not None, dialect.name
    whole, parts = dict[bytes, None](), dict[bytes, None]()
    prefix = f'"{dialect.id_prefix}'.encode()
    for found in dialect.refers.finditer(body):
        (whole if found[0].startswith(prefix) else parts)[found[1]] = None
    return [f"{dialect.id_prefix}{one.decode()}" for one in islice((*whole, *reversed(parts)), _MOST_IDS)]
