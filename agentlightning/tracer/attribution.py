"""Which rollout a request of an in-process agent belongs to, for clients that are made once for all rollouts.

Such a client has the gateway's general base URL. Where its HTTP library sends a request, `attribute` gives it the path
and the key of the attempt whose code is running, as the context knows it. Nothing is guessed: code that runs in no
attempt's context sends its request as it is, and the gateway refuses it with the fix.

`instrument` wraps the libraries that model clients use: openai's and anthropic's clients send by httpx or httpx2,
litellm and others by aiohttp, DSPy by a library of its own. What is wrapped is the one method through which each
library sends a request, and `ThreadPoolExecutor.submit`, which then carries the context into the pool. Libraries that
are not installed are left out; DSPy, which is slow to import, is instrumented if it is loaded.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, urlsplit

from opentelemetry.trace import INVALID_SPAN_ID, get_current_span

from agentlightning.errors import GatewayError
from agentlightning.keys import PREFIX, redacted
from agentlightning.tracer.trace import Trace, current_trace
from agentlightning.types import Span
from agentlightning.types.names import AGENT_BAGGAGE, CONTEXT_HEADER, OTHER_ENDPOINT

GATEWAY_URL = "http://gateway.agentlightning/v1"
"""A base URL for clients that are made before any gateway runs: inside a rollout it means that rollout's gateway."""

_OF_MODELS = ("/chat/completions", "/completions", "/responses", "/messages", ":generateContent")
"""How the paths of requests to models end."""
_NOTED = 3
"""How many calls to other addresses are noted per attempt."""


@dataclass(frozen=True)
class Attributed:
    """Where a request goes instead, and with which headers."""

    origin: str
    """Scheme, host and port."""
    path: str
    headers: Mapping[str, str]
    """Headers to set, by lower-case name."""


AgentName = Callable[[], str | None]


def attribute(url: str, path: str, headers: Mapping[str, str], agent_name: AgentName) -> Attributed | None:
    """What to make of a request to `url` (its origin counts) and `path`; None if it is not for a gateway.

    `headers` by lower-case name. `agent_name` tells the name of the agent whose code is running.
    Raises GatewayError for `GATEWAY_URL` outside of a rollout.
    """
    trace = current_trace()
    access = None if trace is None else trace.access
    origin, general = _origin(url), _origin(GATEWAY_URL)
    if trace is None or access is None:
        if origin == general:
            raise GatewayError(
                "A client with agentlightning's GATEWAY_URL was used outside of a rollout, or in a thread that does "
                "not know its rollout. Start such threads with contextvars.copy_context().run, or give the client the "
                "base URL and key of the rollout's `llm`."
            )
        return None
    gateway = _origin(access.endpoint)
    if origin not in (gateway, general):
        if path.partition("?")[0].endswith(_OF_MODELS):
            _note_other_endpoint(trace, f"{origin}{path.partition('?')[0]}", headers)
        return None
    found: dict[str, str] = {CONTEXT_HEADER: f"{trace.rollout_id}/{trace.attempt_id}", **_spans(trace, headers)}
    name = agent_name()
    if name is not None and AGENT_BAGGAGE not in headers.get("baggage", ""):
        own = f"{AGENT_BAGGAGE}={quote(name, safe='')}"
        found["baggage"] = f"{headers['baggage']},{own}" if headers.get("baggage") else own
    if path.startswith(("/rollout/", "/key/")):  # a client of this rollout's own
        return Attributed(gateway, path, found)
    key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
    if not key.startswith(PREFIX):
        found["authorization"] = f"Bearer {access.api_key}"  # it wins over other keys at the gateway
    return Attributed(gateway, f"/rollout/{trace.rollout_id}/attempt/{trace.attempt_id}{path}", found)


def _note_other_endpoint(trace: Trace, url: str, headers: Mapping[str, str]) -> None:
    """A span for a model call that goes to another address: its tokens are not captured, and the user is told."""
    if trace.closed or sum(span.name == OTHER_ENDPOINT for span in trace.spans) >= _NOTED:
        return
    attributes = {"url.full": redacted(url), "user_agent.original": headers.get("user-agent", "")}
    trace.add(
        Span.from_attributes(
            name=OTHER_ENDPOINT,
            attributes=attributes,
            rollout_id=trace.rollout_id,
            attempt_id=trace.attempt_id,
            trace_id=trace.trace_id,
        )
    )


def _spans(trace: Trace, headers: Mapping[str, str]) -> dict[str, str]:
    """The header that puts the call under the agent's current span, if it is one that is recorded."""
    context = get_current_span().get_span_context()
    if "traceparent" in headers or context.span_id == INVALID_SPAN_ID:
        return {}
    if trace.parent_id(f"{context.span_id:016x}") is None:
        return {}
    return {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-01"}


def _origin(url: str) -> str:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{_bracketed(parts.hostname)}:{port}"


def _bracketed(host: str | None) -> str:
    return f"[{host}]" if host and ":" in host else host or ""


_LM15_MODULE = "dspy._vendor.lm15.transports"
_wrapped: list[tuple[type, str, Callable[..., Any]]] = []
"""Class, method name, and the method as it was."""


def instrument(agent_name: AgentName) -> None:
    """Wrap what is installed; a repeated call wraps what was loaded since. `agent_name` names the running agent."""
    if not _wrapped:
        _instrument_installed(agent_name)
    loaded = sys.modules.get(_LM15_MODULE)
    if loaded is not None and not any(owner.__module__.startswith(_LM15_MODULE) for owner, _, _ in _wrapped):
        for name in ("StdlibTransport", "StdlibAsyncTransport"):
            transport = vars(loaded).get(name, object)
            if "stream" in vars(transport):  # another version of DSPy may send in another way
                _wrap(transport, "stream", lambda stream: _lm15(stream, agent_name))


def _instrument_installed(agent_name: AgentName) -> None:
    for name in ("httpx", "httpx2"):
        if find_spec(name) is not None:
            module = import_module(name)
            logging.getLogger(name).addFilter(_without_keys)
            _wrap(module.Client, "send", lambda send: _httpx(send, agent_name))
            _wrap(module.AsyncClient, "send", lambda send: _httpx(send, agent_name))
    if find_spec("aiohttp") is not None:
        _wrap(import_module("aiohttp").ClientSession, "_request", lambda request: _aiohttp(request, agent_name))
    _wrap(ThreadPoolExecutor, "submit", _in_context)


def uninstrument() -> None:
    """Unwrap everything."""
    while _wrapped:
        owner, name, original = _wrapped.pop()
        setattr(owner, name, original)
    for name in ("httpx", "httpx2"):
        logging.getLogger(name).removeFilter(_without_keys)


def _without_keys(record: logging.LogRecord) -> bool:
    """These libraries log the URL of each request, and an attempt's URL has its key in it."""
    record.msg, record.args = redacted(record.getMessage()), ()
    return True


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = owner.__dict__[name]
    setattr(owner, name, functools.wraps(original)(make(original)))
    _wrapped.append((owner, name, original))


def _httpx(send: Callable[..., Any], agent_name: AgentName) -> Callable[..., Any]:
    """For the sync client and the async one: the request is changed before the call, whichever way it is awaited."""

    def wrapper(self: Any, request: Any, **options: Any) -> Any:
        found = attribute(str(request.url), request.url.raw_path.decode("ascii"), request.headers, agent_name)
        if found is not None:
            request.url = type(request.url)(found.origin + found.path)
            request.headers.update({**found.headers, "host": request.url.netloc.decode("ascii")})
        return send(self, request, **options)

    return wrapper


def _aiohttp(request: Callable[..., Any], agent_name: AgentName) -> Callable[..., Any]:
    async def wrapper(self: Any, method: str, str_or_url: Any, **options: Any) -> Any:
        url = self._build_url(str_or_url)
        given = self._prepare_headers(options.get("headers"))
        found = attribute(str(url), url.raw_path_qs, {k.lower(): v for k, v in given.items()}, agent_name)
        if found is None:
            return await request(self, method, str_or_url, **options)
        given.update(found.headers)
        return await request(
            self, method, type(url)(found.origin + found.path, encoded=True), **{**options, "headers": given}
        )

    return wrapper


def _lm15(stream: Callable[..., Any], agent_name: AgentName) -> Callable[..., Any]:
    """For DSPy's sync transport and its async one."""

    def wrapper(self: Any, request: Any) -> Any:
        given = {name.lower(): value for name, value in request.headers}
        parts = urlsplit(request.url)
        path = f"{parts.path}?{parts.query}" if parts.query else parts.path
        found = attribute(request.url, path, given, agent_name)
        if found is None:
            return stream(self, request)
        others = [(name, value) for name, value in request.headers if name.lower() not in found.headers]
        headers = [*others, *found.headers.items()]
        return stream(self, dataclasses.replace(request, url=found.origin + found.path, headers=headers))

    return wrapper


def _in_context(submit: Callable[..., Any]) -> Callable[..., Any]:
    """Carries the caller's context into the pool, also when it is in no attempt: the thread's own must not count."""

    def wrapper(self: Any, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        return submit(self, contextvars.copy_context().run, fn, *args, **options)

    return wrapper
