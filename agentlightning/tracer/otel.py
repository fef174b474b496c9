"""Collects all spans that any library records with OpenTelemetry's global provider, each in the trace of its attempt.

Hundreds of attempts may run in one process: one span processor, installed once per provider, routes every span by the
context it started in. A span belongs to, in this order: the attempt that made its OpenTelemetry trace id, the attempt
that is current where it starts, the attempt of its parent span.
"""

from __future__ import annotations

import logging
import os
import weakref

from opentelemetry import context as otel_context, trace as otel_trace
from opentelemetry.sdk.trace import ReadableSpan, Span as SdkSpan, SpanProcessor, TracerProvider

from agentlightning.arguments import explained_class
from agentlightning.tracer.base import FLUSH_SECONDS, Tracer
from agentlightning.tracer.frameworks import framework_agent_name
from agentlightning.tracer.trace import Trace, current_trace
from agentlightning.types import Span
from agentlightning.types.names import AGENT_NAME, EXECUTOR_ID

logger = logging.getLogger(__name__)


class SpanRouter(SpanProcessor):
    """Brings each ended span to the trace it belongs to; spans of no attempt pass by."""

    def __init__(self) -> None:
        self._traces: dict[int, Trace] = {}
        """Open traces by their OpenTelemetry trace id."""
        self._owners: dict[int, tuple[Trace, ReadableSpan]] = {}
        """Spans that have not ended, by span id."""

    def open(self, trace: Trace) -> None:
        self._traces[int(trace.trace_id, 16)] = trace

    def close(self, trace: Trace) -> None:
        """Forget the trace. Its spans that have not ended are recorded as they are, without an end time."""
        self._traces.pop(int(trace.trace_id, 16), None)
        # A copy, because threads of other attempts start and end spans meanwhile.
        for span_id, (owner, span) in self._owners.copy().items():
            if owner is trace and self._owners.pop(span_id, None):
                trace.add(_record(span, trace))

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        context = span.get_span_context()
        if context is None:
            return
        trace = self._traces.get(context.trace_id) or self._current()
        if trace is None and span.parent is not None and (known := self._owners.get(span.parent.span_id)):
            trace = known[0]
        if trace is not None:
            self._owners[context.span_id] = (trace, span)

    def _current(self) -> Trace | None:
        """The trace of the attempt this code runs in, if it is open and wants the spans of libraries."""
        trace = current_trace()
        return None if trace is None else self._traces.get(int(trace.trace_id, 16))

    def parent_of(self, span: ReadableSpan) -> ReadableSpan | None:
        """The span around a span, while both are open."""
        known = None if span.parent is None else self._owners.get(span.parent.span_id)
        return None if known is None else known[1]

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        known = None if context is None else self._owners.pop(context.span_id, None)
        if known is not None:
            known[0].add(_record(span, known[0]))


def _record(span: ReadableSpan, trace: Trace) -> Span:
    record = Span.from_opentelemetry(span, trace.rollout_id, trace.attempt_id)
    if record.parent_id != trace.root_id:
        return record
    return record.model_copy(update={"parent_id": None, "parent": None})


_router = SpanRouter()
_routed: weakref.WeakSet[TracerProvider] = weakref.WeakSet()


def route_spans_of(provider: TracerProvider) -> None:
    """Bring the spans of this provider to the traces of their attempts. Once is enough; repeating changes nothing."""
    if provider not in _routed:
        provider.add_span_processor(_router)
        _routed.add(provider)


def current_agent_name() -> str | None:
    """Which agent's code is running: the id of the workflow's step around it, else the name on the innermost open span
    that carries one, else the one that its framework knows.
    """
    current = otel_trace.get_current_span()
    span = current if isinstance(current, ReadableSpan) else None
    name = None
    while span is not None:
        attributes = span.attributes or {}
        if attributes.get(EXECUTOR_ID):
            return str(attributes[EXECUTOR_ID])
        name = name or attributes.get(AGENT_NAME)
        span = _router.parent_of(span)
    return framework_agent_name() if name is None else str(name)


@explained_class
class OtelTracer(Tracer):
    """Collects the spans of the process's global OpenTelemetry provider, and sets one up if there is none.

    An application with a provider of its own sets it before the first trace. Spans of a provider that is not the
    global one are collected after `route_spans_of(provider)`.
    """

    def __init__(self, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        super().__init__(flush_seconds=flush_seconds)
        self._warned = False

    def init(self) -> None:
        super().init()
        provider = otel_trace.get_tracer_provider()
        if isinstance(provider, otel_trace.ProxyTracerProvider):  # nobody has set one yet
            provider = TracerProvider()
            otel_trace.set_tracer_provider(provider)
        if isinstance(provider, TracerProvider):
            route_spans_of(provider)
        if not self._warned and (why := _why_blind(provider)):
            self._warned = True
            logger.warning("Spans of instrumented libraries are not recorded: %s", why)

    def _open(self, trace: Trace) -> None:
        self.init()
        _router.open(trace)

    def _close(self, trace: Trace) -> None:
        _router.close(trace)


def _why_blind(provider: otel_trace.TracerProvider) -> str | None:
    """The reason why no spans will come from the provider, None if they will."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "OTEL_SDK_DISABLED is set in the environment. Unset it to see them."
    if not isinstance(provider, TracerProvider):
        return f"the global provider is {type(provider).__name__}, not the OpenTelemetry SDK's. Do not set another one."
    return None
