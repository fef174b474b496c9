"""The gateway's HTTP side: one ASGI callable that attributes a request, lets it be answered, and sends the answer.

Plain ASGI because this path is measured: no middleware, no per-request objects of a framework. What a request means is
decided by its dialect and the sampler; this file only knows HTTP: paths, keys, disconnects, streams, status codes.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Protocol

from agentlightning.errors import StoreError
from agentlightning.gateway.attempts import Attempts, LiveAttempt
from agentlightning.gateway.dialects import FORWARDED, Dialect, DialectRoute, Paths, refused_in_shape
from agentlightning.gateway.dialects.base import openai_error
from agentlightning.gateway.exchange import CallRequest, Refusal
from agentlightning.gateway.large.requests import LargeRequests
from agentlightning.gateway.limits import Waiting
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.gateway.recording.records import Place, trace_id_of
from agentlightning.gateway.recording.refusals import record_refusal
from agentlightning.gateway.routing.upstream import Upstream
from agentlightning.gateway.sampling.planner import Arrival
from agentlightning.gateway.serving.agent_names import agent_name
from agentlightning.gateway.serving.answering import Exchange, Relay, Target, refusal_for, while_connected
from agentlightning.gateway.serving.attempt_api import PATHS, AttemptApi
from agentlightning.gateway.serving.http import (
    DisconnectedError,
    Receive,
    Scope,
    Send,
    api_key,
    drain,
    headers_of,
    left_out_header,
    read_body,
    send_body,
    send_json,
    with_request_id,
)
from agentlightning.gateway.serving.reading import Incoming, Reader, Router
from agentlightning.gateway.serving.switches import with_switch
from agentlightning.keys import CALLS, CLOSE, PREFIX, AttemptKey, redacted, verify_attempt_key, verify_url_key
from agentlightning.net.backoff import ObservedRequest
from agentlightning.net.server import Busy, asks_for_health
from agentlightning.types.names import CONTEXT_HEADER, NO_SUCH_PATH

_PATH = re.compile(
    r"(?:/key/(?P<key>[^/]+))?"
    r"(?:/rollout/(?P<rollout>[^/]+)/attempt/(?P<attempt>[^/]+)(?:/key/(?P<url_key>[^/]+))?)?"
    r"(?:/agent/(?P<agent>[^/]+))?(?:/v1(?:(?:alpha|beta)\d*)?)*(?P<rest>/.*)"
)
_CONTEXT = CONTEXT_HEADER.encode()
_MOST_REASONS = 16
_GREETINGS = ("/", "/api/hello")
"""What clients ask for to see whether somebody is there."""
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_OF_TRAINING = ("files", "fine_tuning", "api/v1/")
"""Where clients of OpenAI's fine-tuning and of Tinker begin."""


class GatewayApp:
    """The ASGI application."""

    def __init__(
        self,
        attempts: Attempts,
        router: Router,
        recorder: Recorder,
        api: AttemptApi,
        large: LargeRequests,
        secret: bytes,
        *,
        busy: Busy,
        dialects: Sequence[Dialect],
        keep_alive_seconds: float,
        read_seconds: float,
        instance: Callable[[], str],
        strict: bool,
    ) -> None:
        self._attempts = attempts
        self._router = router
        self._recorder = recorder
        self._api = api
        self._secret = secret
        self._keep_alive_seconds = keep_alive_seconds
        self._read_seconds = read_seconds
        self._limits = large.limits
        self._backoff = large.backoff
        self._reader = Reader(router, large.limits, large, strict=strict)
        self._waiting = Waiting(large.limits)
        self._busy = busy
        self._instance = instance
        self._paths = Paths(dialects, FORWARDED)
        self.refused_requests: Counter[str] = Counter()
        """Requests that belong to no attempt, by why they were refused."""
        self.trouble: str | None = None
        """Why no model can be sampled from just now, for /health."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"the gateway speaks HTTP only, not {scope['type']}")
        send = with_request_id(send)
        match = _PATH.fullmatch(scope["path"])
        rest = match["rest"] if match else scope["path"]
        route = self._paths.find(rest, scope["query_string"].decode("latin-1"))
        if route is not None and match is not None:
            if scope["method"] == "POST":
                await self._call(route, match, scope, receive, send)
            else:
                refusal = Refusal(f"Use POST for {rest}.", status=405, code="method_not_allowed")
                await send_body(send, 405, route.dialect.refuse(refusal))
        elif rest in PATHS and match is not None and scope["method"] == "POST":
            await self._of_attempt(match, scope, receive, send)
        elif rest == "/models":
            await send_json(send, 200, self._models())
        elif rest.startswith("/models/") and rest.removeprefix("/models/") in self._router.names():
            await send_json(send, 200, _model(rest.removeprefix("/models/")))
        elif rest == "/health":
            health = {"status": "ok"} if self.trouble is None else {"status": "unavailable", "reason": self.trouble}
            await send_json(send, 200 if self.trouble is None else 503, {"instance": self._instance(), **health})
        else:
            await self._nowhere(match, rest, scope, send)

    def warn_with(self, warn: Callable[[str], None]) -> None:
        self._reader.warn = warn

    async def _nowhere(self, match: re.Match[str] | None, rest: str, scope: Scope, send: Send) -> None:
        """Answer a request for something that is not served, in the shape that its client reads."""
        if rest in _GREETINGS and scope["method"] in ("GET", "HEAD"):
            await send_json(send, 200, {})
            return
        known = [path for path in self._paths.known if "{" not in path]  # Gemini's have the model's name in them
        served = ", ".join(f"/v1{path}" for path in (*known, "/models"))
        message = f"{NO_SUCH_PATH}{redacted(rest)} here. Served are {served}, and Gemini's paths (docs/gateway.md)."
        if rest.lstrip("/").startswith(_OF_TRAINING):
            message += " Fine-tuning has a server of its own:  agl serve MODEL --training FOLDER"
        refusal = Refusal(message, status=404, code="not_found")
        asks = match is not None and scope["method"] == "POST"
        if match is None or not asks or not await self._recorded(match, dict(scope["headers"]), refusal):
            self._count_refusal(refusal)
        await send_body(send, 404, refused_in_shape(refusal, scope))

    async def _recorded(self, match: re.Match[str], headers: Mapping[bytes, bytes], refusal: Refusal) -> bool:
        """Write down that a request was refused, if it is known whose it was."""
        try:
            key = self._attribute(match, headers)
            live = await self._attempts.get(key.rollout_id, key.attempt_id)
        except (Refusal, StoreError):
            return False
        if self._recorder.is_full(live.key):
            return False
        record_refusal(self._recorder, live, _place(live, headers, match["agent"]), "unknown", refusal, time.time())
        return True

    def dialect_of(self, path: str, query: str) -> Dialect | None:
        """The wire format of the calls that are sent there; None if none are."""
        match = _PATH.fullmatch(path)
        route = None if match is None else self._paths.find(match["rest"], query)
        return None if route is None else route.dialect

    def trusts(self, scope: Scope) -> bool:
        """Whether a request is a runner's, or asks for health."""
        if asks_for_health(scope):
            return True
        match = _PATH.fullmatch(scope["path"])
        try:
            return match is not None and CLOSE in self._attribute(match, headers_of(scope)).scopes
        except Refusal:
            return False

    def _models(self) -> dict[str, Any]:
        names = self._router.names()
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # for Anthropic's clients
        models = [_model(name) for name in names]
        return {"object": "list", "data": models, "models": models, **page}  # "models" for Google's clients

    async def _call(self, route: DialectRoute, path: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        watched = ObservedRequest(receive, send)
        with ExitStack() as counted:
            counted.callback(self._backoff.settle, watched)
            handler = await self._begin(route, path, headers_of(scope), counted, watched)
            if handler is not None:
                watched.samples = isinstance(handler, Exchange)
                watched.forwarded = isinstance(handler, Relay)
                await handler.run(watched.receive, watched.send)

    async def _begin(
        self,
        route: DialectRoute,
        path: re.Match[str],
        headers: Mapping[bytes, bytes],
        counted: ExitStack,
        watched: ObservedRequest,
    ) -> Handler | None:
        """What will answer a request, which is `counted` from now on; None if it has been refused, or given up."""
        unread, receive = True, watched.receive
        try:
            key = self._attribute(path, headers)
            if CALLS not in key.scopes:
                raise _wrong_attempt(key)
            unread = False  # nobody waits for the rest of a body that is refused for others
            if not counted.enter_context(self._busy.one((key.rollout_id, key.attempt_id))):
                raise _too_busy(self._busy)
            await self._wait(watched, key)
            unread = True
            self._limits.check_length(headers.get(b"content-length"))
            unread = False
            async with self._received(receive, headers, key) as body:
                live = await self._attempts.get(key.rollout_id, key.attempt_id)
                if self._recorder.is_full(live.key):
                    await while_connected(receive, live.running, self._recorder.wait_until_writable(live.key))
                await live.turns.take()
                place = _place(live, headers, path["agent"])
                return await self._handler(route, path["key"] is None, body, live, place, receive, headers)
        except DisconnectedError:
            return None
        except Exception as error:  # the last one who can give the client an answer
            refusal = refusal_for(error)
            if refusal.status == 401:
                self._count_refusal(refusal)
            if unread:
                await self._drain(receive, headers, refusal)
            await send_body(watched.send, refusal.status, route.dialect.refuse(refusal))
            return None

    async def _wait(self, watched: ObservedRequest, key: AttemptKey) -> None:
        """Wait until the request may be read. Raises `Refusal` if that takes too long."""
        refusal = await self._backoff.wait(watched, (key.rollout_id, key.attempt_id), self._read_seconds)
        if refusal is not None:
            raise Refusal(refusal, status=429, kind="rate_limit_error", code="refused_too_often")

    @asynccontextmanager
    async def _received(
        self, receive: Receive, headers: Mapping[bytes, bytes], key: AttemptKey
    ) -> AsyncIterator[bytes]:
        """The body of a request, which counts as waiting until this context ends."""
        owner, held = (key.rollout_id, key.attempt_id), 0

        def hold(size: int) -> None:
            nonlocal held
            self._waiting.hold(owner, size)
            held += size

        try:
            yield await read_body(receive, self._read_seconds, self._limits, headers.get(b"content-length"), hold)
        finally:
            self._waiting.release(owner, held)

    async def _drain(self, receive: Receive, headers: Mapping[bytes, bytes], refusal: Refusal) -> None:
        """Let a client that is refused before its body was read send it to the end, unless it waits to be asked."""
        if b"expect" not in headers:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._read_seconds):
                    await drain(receive)

    def _count_refusal(self, refusal: Refusal) -> None:
        """Count a request that no attempt's record can hold. Few texts are kept: anybody may send anything."""
        if refusal.message in self.refused_requests or len(self.refused_requests) < _MOST_REASONS:
            self.refused_requests[refusal.message] += 1

    async def _of_attempt(self, path: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        watched = ObservedRequest(receive, send)
        try:
            await self._answer_of_attempt(path, headers_of(scope), watched)
        finally:
            self._backoff.settle(watched)

    async def _answer_of_attempt(
        self, path: re.Match[str], headers: Mapping[bytes, bytes], watched: ObservedRequest
    ) -> None:
        unread = True
        try:
            key = self._attribute(path, headers)
            owner, is_runner = (key.rollout_id, key.attempt_id), CLOSE in key.scopes
            unread = False
            if not is_runner:
                await self._wait(watched, key)
            unread = True
            self._limits.check_length(headers.get(b"content-length"))
            unread = False
            with self._busy.one(owner) as fits:
                if not fits and not is_runner:
                    raise _too_busy(self._busy)
                async with self._received(watched.receive, headers, key) as body:
                    answer = await self._api.answer(path["rest"], key, body)
        except DisconnectedError:
            return
        except Exception as error:  # the last one who can give the client an answer
            refusal = refusal_for(error)
            if unread:
                await self._drain(watched.receive, headers, refusal)
            await send_json(watched.send, refusal.status, openai_error(refusal))
            return
        await send_json(watched.send, 200, answer)

    async def _handler(
        self,
        route: DialectRoute,
        knows_models: bool,
        body: bytes,
        live: LiveAttempt,
        place: Place,
        receive: Receive,
        headers: Mapping[bytes, bytes],
    ) -> Handler:
        """What will answer a request. Raises `Refusal`, which is recorded: the attempt is known by now."""
        start = time.time()
        knows_models = knows_models and not self._router.takes_any_name
        incoming = Incoming(route, body, live, place, knows_models=knows_models)
        try:
            self._check_open(live)
            read = await self._reader.read(incoming, receive)
            if isinstance(read, int):
                return _Counted(route.dialect, read)
            target = self._router.target(incoming.model)
            if isinstance(target, Upstream):
                assert isinstance(read, Mapping), "what another provider answers goes on as it is"
                large = self._limits.is_large(body)
                forwarding = target.forward(route, read, live, place, key=_own_key(headers), large=large)
                return Relay(route.dialect, forwarding, live.running, self._recorder.admitted(live.key))
            assert isinstance(read, CallRequest), "what is answered here has been read"
        except Refusal as found:
            refusal = with_switch(found, headers)
            record_refusal(self._recorder, live, place, incoming.model, refusal, start)
            raise refusal from found
        if route.counting:
            return _Count(route.dialect, target, read, live)
        arrival = _arrive(live, read, route.dialect, place, start)
        admitted = self._recorder.admitted(live.key, read.n)
        return Exchange(route.dialect, target, arrival, admitted, self._keep_alive_seconds)

    def _check_open(self, live: LiveAttempt) -> None:
        if len(live.running) >= self._limits.open_requests:
            raise Refusal(
                f"This attempt has {len(live.running)} requests open, as many as it may (open_requests).",
                status=429,
                kind="rate_limit_error",
                code="too_many_requests",
            )

    def _attribute(self, path: re.Match[str], headers: Mapping[bytes, bytes]) -> AttemptKey:
        """Whose call this is: the header's key says so if it is one of ours, else the key in the URL."""
        rollout, attempt = path["rollout"], path["attempt"]
        scoped = self._verified(api_key(headers)) or self._verified(path["key"])
        if scoped is None and path["url_key"] is not None:
            scoped = verify_url_key(self._secret, rollout, attempt, path["url_key"])
        if scoped is None:
            raise _not_attributed() if rollout is None else _no_key()
        if rollout is not None and (rollout, attempt) != (scoped.rollout_id, scoped.attempt_id):
            raise _wrong_attempt(scoped)
        running = headers.get(_CONTEXT, b"").decode("latin-1")
        if running and running != f"{scoped.rollout_id}/{scoped.attempt_id}":
            raise _wrong_client(scoped, running)
        return scoped

    def _verified(self, key: str | None) -> AttemptKey | None:
        return verify_attempt_key(self._secret, key) if key else None


def _too_busy(busy: Busy) -> Refusal:
    return Refusal(busy.refusal, status=429, kind="rate_limit_error", code="too_many_connections")


def _not_attributed() -> Refusal:
    return Refusal(
        "This call cannot be attributed to a rollout. Use the base URL of the `llm` resource that the agent is given "
        "(llm.get_base_url()), or an attempt's API key (llm.api_key) with the plain URL. A client that is made once "
        "for all rollouts works inside a rollout's own tasks and thread pools, if it sends by httpx or aiohttp; start "
        "other threads with contextvars.copy_context().run, or run one process per rollout.",
        status=401,
        kind="authentication_error",
        code="not_attributed",
    )


def _no_key() -> Refusal:
    return Refusal(
        "This URL lacks the key of its attempt. Give the client the base URL of the `llm` resource that the agent is "
        "given, as it is (llm.get_base_url()), or pass `llm.api_key`.",
        status=401,
        kind="authentication_error",
        code="invalid_api_key",
    )


def _wrong_attempt(key: AttemptKey) -> Refusal:
    return Refusal(
        f"The API key belongs to attempt '{key.attempt_id}' of rollout '{key.rollout_id}' and opens no other. "
        "Create the client inside the rollout, from the `llm` resource that this rollout is given.",
        status=403,
        kind="permission_error",
        code="wrong_attempt",
    )


def _wrong_client(key: AttemptKey, running: str) -> Refusal:
    return Refusal(
        "This client was made in another rollout. Make it in each (and the framework's agent or graph that holds it) "
        "with OpenAI(base_url=llm.endpoint, api_key=llm.api_key), since rollouts share os.environ and openai.api_key; "
        f"or make it once with base_url=agl.GATEWAY_URL. The code of {running} (rollout/attempt) sent this call with a "
        f"client of {key.rollout_id}/{key.attempt_id}, so it cannot be said whose it is.",
        status=403,
        kind="permission_error",
        code="wrong_client",
    )


def _model(name: str) -> dict[str, Any]:
    """A model as OpenAI, Anthropic and Google describe theirs."""
    now = int(time.time())
    openai = {"object": "model", "created": now, "owned_by": "agentlightning"}
    since = datetime.fromtimestamp(now, UTC).isoformat()
    methods = ["generateContent", "countTokens"]
    google = {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
    return {"id": name, **openai, "type": "model", "display_name": name, "created_at": since, **google}


class Handler(Protocol):
    """Answers one request."""

    async def run(self, receive: Receive, send: Send) -> None: ...


class _Count:
    """Tells how many tokens a request's prompt has."""

    def __init__(self, dialect: Dialect, target: Target, request: CallRequest, live: LiveAttempt) -> None:
        self._dialect = dialect
        self._target = target
        self._request = request
        self._live = live

    async def run(self, receive: Receive, send: Send) -> None:
        try:
            count = await while_connected(receive, self._live.running, self._target.count(self._request, self._live))
        except DisconnectedError:
            return
        except Exception as error:  # the last one who can give the client an answer
            refusal = refusal_for(error)
            await send_body(send, refusal.status, self._dialect.refuse(refusal))
            return
        await send_body(send, 200, self._dialect.counted(count), left_out_header(self._request.left_out))


class _Counted:
    """Tells what was counted while the request was read."""

    def __init__(self, dialect: Dialect, tokens: int) -> None:
        self._dialect = dialect
        self._tokens = tokens

    async def run(self, receive: Receive, send: Send) -> None:
        await send_body(send, 200, self._dialect.counted(self._tokens))


def _arrive(live: LiveAttempt, request: CallRequest, dialect: Dialect, place: Place, start: float) -> Arrival:
    number = live.requests
    live.requests += 1
    response_id = f"{dialect.id_prefix}{uuid.uuid4().hex}"
    return Arrival(request=request, live=live, place=place, response_id=response_id, number=number, start=start)


def _place(live: LiveAttempt, headers: Mapping[bytes, bytes], agent: str | None) -> Place:
    """Where in a trace the call belongs: under the client's own span if it says so."""
    name = agent_name(headers, agent)
    judge = headers.get(b"x-agl-role") == b"judge"
    found = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"").decode("latin-1"))
    if found is None:
        return Place(trace_id=trace_id_of(live.rollout_id, live.attempt_id), agent=name, judge=judge)
    return Place(trace_id=found[1], parent_span_id=found[2], agent=name, judge=judge)


def _own_key(headers: Mapping[bytes, bytes]) -> str | None:
    """The client's own API key, which is none of ours: the URL alone says whose call it is. For a provider of which the
    gateway knows no key.
    """
    key = api_key(headers)
    return key if key and not key.startswith(PREFIX) else None
