"""The trace: the spans of one attempt, in the order they ended, and which trace is the current one.

A trace is written by everything that happens inside its context: emitters, operations, and the spans of instrumented
libraries that a tracer routes to it; from any task or thread. It opens and closes once. It knows no OpenTelemetry SDK:
what it takes are finished records. A trace may have a `ToolReplay`: the recorded results that are left for the
attempt's own tools.

What is current travels in OpenTelemetry's own context, because frameworks that hand work to threads of their own carry
that context along, and in a variable beside it, because some start from an empty OpenTelemetry context.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry.trace import INVALID_SPAN_ID, NonRecordingSpan, SpanContext, TraceFlags, get_current_span
from opentelemetry.trace.propagation import set_span_in_context

from agentlightning.types import RecordedTool, Span
from agentlightning.types.html import table_html
from agentlightning.types.ids import random_hex
from agentlightning.types.recording import digest_of

logger = logging.getLogger(__name__)

_KEY = otel_context.create_key("agentlightning-trace")
_fallback: ContextVar[Trace | None] = ContextVar("agentlightning_trace", default=None)


@dataclass(frozen=True)
class GatewayAccess:
    """How an attempt reaches the gateway."""

    endpoint: str
    """A URL of the gateway, whose scheme, host and port count."""
    api_key: str


class Trace:
    """The spans of one attempt.

    `rollout_id` and `attempt_id` are made up when none are given (a trace outside any rollout). All spans that do not
    bring a trace of their own share `trace_id`, so that a framework's spans and ours form one tree.
    """

    def __init__(self, name: str | None = None, rollout_id: str | None = None, attempt_id: str | None = None) -> None:
        self.name = name
        self.rollout_id = rollout_id or f"ro-{random_hex(6)}"
        self.attempt_id = attempt_id or f"at-{random_hex(6)}"
        self.trace_id = random_hex(16)
        self.root_id = random_hex(8)
        """The span id that top-level spans see as their parent. No span has it: recorded spans drop it."""
        self.access: GatewayAccess | None = None
        """How this attempt reaches the gateway, for clients that are not its own."""
        self.tools: ToolReplay | None = None
        """In a fork: the recorded results of the agent's own tools."""
        self._spans: list[Span] = []
        self._stored = 0
        self._closed = False
        self._refused = 0
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[Span]:
        """The spans so far, in the order they ended."""
        with self._lock:
            return list(self._spans)

    def _repr_html_(self) -> str:
        """What a notebook shows: a row per span."""
        took = [f"{(s.end_time or 0) - (s.start_time or 0):.3f} s" for s in self.spans]
        rows = [(s.name, seconds, str(s.attributes)[:400]) for s, seconds in zip(self.spans, took, strict=True)]
        return table_html(("span", "took", "attributes"), rows)

    @property
    def closed(self) -> bool:
        return self._closed

    def add(self, span: Span) -> bool:
        """Record a finished span. After the end of the attempt it is refused: False, and one warning per trace."""
        with self._lock:
            if not self._closed:
                self._spans.append(span)
                return True
            self._refused += 1
        if self._refused == 1:  # a thread that was left behind may go on for ever
            logger.warning(
                "Span '%s' ended after attempt %s of rollout %s was over. It is not recorded, nor are further ones: "
                "wait for background work before the agent returns.",
                span.name,
                self.attempt_id,
                self.rollout_id,
            )
        return False

    def close(self) -> None:
        """Refuse spans from now on. Idempotent."""
        with self._lock:
            self._closed = True

    def unstored(self) -> Sequence[Span]:
        """The spans that `mark_stored` was not told about yet."""
        with self._lock:
            return self._spans[self._stored :]

    def mark_stored(self, count: int) -> None:
        """The next `count` spans are in the store."""
        with self._lock:
            self._stored += count

    def parent_id(self, span_id: str | None) -> str | None:
        """A parent id as it is recorded: the root is not a span, its children are roots."""
        return None if span_id == self.root_id else span_id

    def context(self) -> otel_context.Context:
        """The current OpenTelemetry context with this trace, and its root as the parent of what starts next."""
        return otel_context.set_value(_KEY, self, self.parent_context(self.root_id))

    def parent_context(self, span_id: str, trace_id: str | None = None) -> otel_context.Context:
        """The current OpenTelemetry context with a span of this trace as the parent of what starts next."""
        parent = SpanContext(
            trace_id=int(trace_id or self.trace_id, 16),
            span_id=int(span_id, 16),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )
        return set_span_in_context(NonRecordingSpan(parent))


def current_trace() -> Trace | None:
    """The trace of the attempt this code runs in, None outside of any."""
    trace = otel_context.get_value(_KEY)
    return trace if isinstance(trace, Trace) else _fallback.get()


@dataclass(frozen=True)
class Outside:
    """What was current before a trace was attached."""

    context: otel_context.Context
    trace: Trace | None


def capture() -> Outside:
    return Outside(otel_context.get_current(), _fallback.get())


def attach(trace: Trace) -> None:
    """Make the trace current for this task, and for the tasks and threads it starts with a copy of its context."""
    _fallback.set(trace)
    otel_context.attach(trace.context())


def detach(outside: Outside) -> None:
    """Put back what was current. By value: a token would be refused in another task than it came from."""
    otel_context.attach(outside.context)
    _fallback.set(outside.trace)


def current_parent(trace: Trace) -> tuple[str, str | None]:
    """Trace id and parent id for a span that starts now: those of the OpenTelemetry span this code runs in."""
    current = get_current_span().get_span_context()
    if current.span_id == INVALID_SPAN_ID:
        return trace.trace_id, None
    return f"{current.trace_id:032x}", trace.parent_id(f"{current.span_id:016x}")


class ToolReplay:
    """The tool calls of a recording that are left. Calls may come in any order and from any thread: of those with the
    same name and the same arguments the first gets the first record, and so on."""

    def __init__(self, tools: Sequence[RecordedTool]) -> None:
        self._lock = threading.Lock()
        self._left: dict[tuple[str | None, str, str], deque[RecordedTool]] = {}
        for tool in tools:
            self._left.setdefault((tool.inside, tool.name, tool.arguments), deque()).append(tool)

    def take(self, name: str, arguments: str, inside: str | None) -> RecordedTool | None:
        """The record of a call with these arguments, as JSON text; None where there is none, or none is left.

        `inside`: the record of the decorated function that makes the call, so that what a tool calls is no answer to
        what the agent calls itself.
        """
        with self._lock:
            left = self._left.get((inside, name, digest_of(arguments)))
            return left.popleft() if left else None
