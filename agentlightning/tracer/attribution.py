"""Which rollout a request of an in-process agent belongs to, for clients that are made once for all rollouts.

Such a client has the gateway's general base URL. Where its HTTP library sends a request, `attribute` gives it the path
and the key of the attempt whose code is running, as the context knows it. Nothing is guessed: code that runs in no
attempt's context sends its request as it is, and the gateway refuses it with the fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
"""Calls to other addresses that are noted per attempt."""


@dataclass(frozen=True)
class Attributed:
    """What a request becomes."""

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
