"""The gateway's HTTP side: one ASGI callable that attributes a request, lets it be answered, and sends the answer.

Plain ASGI because this path is measured: no middleware, no per-request objects of a framework. What a request means is
decided by its dialect and the sampler; this file only knows HTTP: paths, keys, disconnects, streams, status codes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agentlightning.gateway.attempts import Attempts, LiveAttempt
from agentlightning.gateway.dialects import DIALECTS, Dialect
from agentlightning.gateway.dialects.base import StreamWriter, openai_error
from agentlightning.gateway.exchange import CallRequest, Choice, Delta, Refusal, Reply
from agentlightning.gateway.records import Place, trace_id_of
from agentlightning.gateway.rendering import Rendering
from agentlightning.gateway.sampler import Arrival, Emit
from agentlightning.keys import CALLS, verify_attempt_key

logger = logging.getLogger(__name__)

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

MAX_BODY_BYTES = 64 * 2**20
KEEP_ALIVE_SECONDS = 10.0
"""How long a stream may be silent before a comment is sent, so that no proxy or client gives it up."""

_PATH = re.compile(r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+))?(?:/v1)*(?P<rest>/.*)")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_JSON = (b"content-type", b"application/json")
_GONE = object()


class Target(Protocol):
    """Whatever answers requests: an engine behind a sampler, another provider."""

    @property
    def rendering(self) -> Rendering: ...

    async def answer(self, arrival: Arrival, emit: Emit | None) -> Reply: ...

    async def count(self, request: CallRequest) -> int:
        """How many tokens a request's prompt has."""
        ...


class Router(Protocol):
    """Which target a model name means."""

    def target(self, model: str) -> Target:
        """Raises `Refusal` for an unknown model."""
        ...

    def names(self) -> Sequence[str]: ...


class GatewayApp:
    """The ASGI application."""

    def __init__(self, attempts: Attempts, router: Router, admit: Callable[[], Awaitable[None]], secret: bytes) -> None:
        self._attempts = attempts
        self._router = router
        self._admit = admit
        self._secret = secret
        self._dialects = {path: dialect for dialect in DIALECTS for path in dialect.paths}
        self._counting = {path: dialect for dialect in DIALECTS for path in dialect.counting_paths}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the gateway speaks HTTP only, not {scope['type']}")
        match = _PATH.fullmatch(scope["path"])
        rest = match["rest"] if match else scope["path"]
        dialect = self._dialects.get(rest) or self._counting.get(rest)
        if dialect is not None and match is not None:
            if scope["method"] == "POST":
                counting = rest in self._counting
                await self._call(dialect, match["rollout"], match["attempt"], scope, receive, send, counting)
            else:
                refusal = Refusal(f"Use POST for {scope['path']}.", status=405, code="method_not_allowed")
                await _send_body(send, 405, dialect.refuse(refusal))
        elif rest == "/models":
            await _send_json(send, 200, self._models())
        elif rest == "/health":
            await _send_json(send, 200, {"status": "ok"})
        else:
            known = ", ".join(f"/v1{path}" for path in (*self._dialects, "/models"))
            refusal = Refusal(f"There is no {scope['path']} here. Served are {known}.", status=404, code="not_found")
            await _send_json(send, 404, openai_error(refusal))

    def _models(self) -> dict[str, Any]:
        created = int(time.time())
        models = [
            {"id": n, "object": "model", "created": created, "owned_by": "agentlightning"} for n in self._router.names()
        ]
        return {"object": "list", "data": models}

    async def _call(
        self,
        dialect: Dialect,
        rollout: str | None,
        attempt: str | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        counting: bool,
    ) -> None:
        headers = dict(scope["headers"])
        try:
            body = await _read(receive)
            rollout_id, attempt_id = self._attribute(rollout, attempt, headers)
            live = await self._attempts.get(rollout_id, attempt_id)
            request = dialect.parse(_decode(body), live.answered)
            target = self._router.target(request.model)
            if counting:
                await _send_body(send, 200, msgspec.json.encode({"input_tokens": await target.count(request)}))
                return
        except Refusal as refusal:
            await _send_body(send, refusal.status, dialect.refuse(refusal))
            return
        except _Disconnected:
            return
        arrival = _arrive(live, request, dialect, headers)
        await _Exchange(dialect, target, arrival, self._admit).run(receive, send)

    def _attribute(self, rollout: str | None, attempt: str | None, headers: Mapping[bytes, bytes]) -> tuple[str, str]:
        """Whose call this is. Its key must be that attempt's own."""
        key = _key(headers)
        scoped = verify_attempt_key(self._secret, key) if key else None
        if scoped is None:
            if rollout is None:
                raise Refusal(
                    "This call cannot be attributed to a rollout. Use the base URL and API key of the `llm` resource "
                    "that "
                    "the agent is given (llm.get_base_url(), llm.api_key), or an attempt's API key with the plain URL.",
                    status=401,
                    kind="authentication_error",
                    code="not_attributed",
                )
            raise Refusal(
                "This call needs the API key of its attempt. Pass `llm.api_key` of the resource that the agent is "
                "given to "
                "the client, next to its base URL.",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
            )
        if (rollout is not None and (rollout, attempt) != (scoped.rollout_id, scoped.attempt_id)) or (
            CALLS not in scoped.scopes
        ):
            raise Refusal(
                f"The API key belongs to attempt '{scoped.attempt_id}' of rollout '{scoped.rollout_id}' and opens no "
                "other. "
                "Create the client inside the rollout, from the `llm` resource that this rollout is given.",
                status=403,
                kind="permission_error",
                code="wrong_attempt",
            )
        return scoped.rollout_id, scoped.attempt_id


class _Exchange:
    """One request on its way: sampling in a task, sending here, whichever ends first."""

    def __init__(
        self, dialect: Dialect, target: Target, arrival: Arrival, admit: Callable[[], Awaitable[None]]
    ) -> None:
        self._dialect = dialect
        self._target = target
        self._arrival = arrival
        self._admit = admit

    async def run(self, receive: Receive, send: Send) -> None:
        events: asyncio.Queue[Any] | None = asyncio.Queue() if self._arrival.request.stream else None
        work = asyncio.create_task(self._work(events))
        gone = asyncio.create_task(_wait_until_gone(receive, work))
        running = self._arrival.live.running
        running.add(work)
        work.add_done_callback(running.discard)
        try:
            if events is None:
                await self._answer(work, send)
            else:
                await self._stream(events, work, send)
        finally:
            gone.cancel()
            work.cancel()

    async def _work(self, events: asyncio.Queue[Any] | None) -> Reply:
        await self._admit()
        request = self._arrival.request
        try:
            reply = await self._target.answer(self._arrival, None if events is None else events.put_nowait)
            if request.remember is not None:
                said = reply.choices[0].message()
                self._arrival.live.answered[reply.response_id] = [*request.remember, said]
            return reply
        finally:
            if events is not None:
                events.put_nowait(_GONE)

    async def _answer(self, work: asyncio.Task[Reply], send: Send) -> None:
        await asyncio.wait([work])
        outcome = _outcome(work)
        if isinstance(outcome, Refusal):
            await _send_body(send, outcome.status, self._dialect.refuse(outcome))
        else:
            await _send_body(send, 200, self._dialect.respond(self._arrival.request, outcome, self._target.rendering))

    async def _stream(self, events: asyncio.Queue[Any], work: asyncio.Task[Reply], send: Send) -> None:
        """Headers wait for the first token, so that a request that is refused gets its status code."""
        begin, first = await events.get(), None
        if begin is not _GONE:
            first = await _next(events)
        if begin is _GONE or first is _GONE:
            outcome = _outcome(await _finished(work))
            if isinstance(outcome, Refusal):
                await _send_body(send, outcome.status, self._dialect.refuse(outcome))
                return
        arrival = self._arrival
        writer = self._dialect.writer(arrival.request, arrival.response_id, int(arrival.start), self._target.rendering)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, writer.start(begin.prompt_tokens))
        event = first
        while event is not _GONE:
            await _send_part(send, b": keep-alive\n\n" if event is None else _written(writer, event))
            event = await _next(events)
        outcome = _outcome(await _finished(work))
        last = writer.fail(outcome) if isinstance(outcome, Refusal) else writer.finish(outcome)
        await send({"type": "http.response.body", "body": last, "more_body": False})


class _Disconnected(Exception):
    """The client went away while it was still sending its request."""


def _arrive(live: LiveAttempt, request: CallRequest, dialect: Dialect, headers: Mapping[bytes, bytes]) -> Arrival:
    number = live.requests
    live.requests += 1
    return Arrival(
        request=request,
        live=live,
        place=_place(live, headers),
        response_id=f"{dialect.id_prefix}{uuid.uuid4().hex}",
        number=number,
        start=time.time(),
    )


def _place(live: LiveAttempt, headers: Mapping[bytes, bytes]) -> Place:
    """Where in a trace the call belongs: under the client's own span if it says so."""
    agent = headers.get(b"x-agl-agent")
    name = None if agent is None else agent.decode("utf-8", "replace")
    found = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"").decode("latin-1"))
    if found is None:
        return Place(trace_id=trace_id_of(live.rollout_id, live.attempt_id), agent=name)
    return Place(trace_id=found[1], parent_span_id=found[2], agent=name)


def _key(headers: Mapping[bytes, bytes]) -> str:
    """The API key as OpenAI's clients send it, or as Anthropic's do."""
    bearer = headers.get(b"authorization", b"").decode("latin-1")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return headers.get(b"x-api-key", b"").decode("latin-1")


def _decode(body: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise Refusal(f"The request body is not valid JSON: {error}.", code="invalid_json") from error
    if not isinstance(found, dict):
        raise Refusal("The request body must be a JSON object.", code="invalid_json")
    return found


async def _read(receive: Receive) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise Refusal(
                f"The request body is larger than {MAX_BODY_BYTES // 2**20} MiB.", status=413, code="body_too_large"
            )
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def _wait_until_gone(receive: Receive, work: asyncio.Task[Any]) -> None:
    """A client that hangs up ends the sampling of its answer."""
    while (await receive())["type"] != "http.disconnect":
        pass
    work.cancel()


async def _next(events: asyncio.Queue[Any]) -> Any:
    """The next event; None if there was none for a while."""
    if not events.empty():
        return events.get_nowait()
    try:
        async with asyncio.timeout(KEEP_ALIVE_SECONDS):
            return await events.get()
    except TimeoutError:
        return None


async def _finished(work: asyncio.Task[Reply]) -> asyncio.Task[Reply]:
    await asyncio.wait([work])
    return work


def _outcome(work: asyncio.Task[Reply]) -> Reply | Refusal:
    """What became of a request; a bug in answering it is logged, and told as a server error."""
    if work.cancelled():
        return Refusal("The attempt ended before this call did.", status=410, code="attempt_closed")
    error = work.exception()
    if error is None:
        return work.result()
    if isinstance(error, Refusal):
        return error
    logger.error("Answering a model call failed.", exc_info=error)
    return Refusal(
        f"The gateway failed on this call ({type(error).__name__}: {error}). Its log has the details.",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def _written(writer: StreamWriter, event: Delta | Choice) -> bytes:
    return writer.delta(event) if isinstance(event, Delta) else writer.choice(event)


async def _send_json(send: Send, status: int, body: Any) -> None:
    await _send_body(send, status, msgspec.json.encode(body))


async def _send_body(send: Send, status: int, body: bytes) -> None:
    headers = [_JSON, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _send_part(send: Send, part: bytes) -> None:
    if part:
        await send({"type": "http.response.body", "body": part, "more_body": True})
