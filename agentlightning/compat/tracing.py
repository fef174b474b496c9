"""The active tracer, and methods that tracers had."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as otel_context, trace as otel_trace

from agentlightning.compat.types import StatusCode
from agentlightning.emitter.record import error_status, exception_attributes, plain
from agentlightning.store.base import LightningStore
from agentlightning.tracer import Tracer, current_trace
from agentlightning.tracer.trace import Trace, current_parent
from agentlightning.tracer.tree import SpanTree
from agentlightning.types import Span, SpanStatus
from agentlightning.types.ids import random_hex

_active: Tracer | None = None


def set_active_tracer(tracer: Tracer) -> None:
    """Raises ValueError if there is one already."""
    global _active
    if _active is not None:
        raise ValueError("There is an active tracer already; call clear_active_tracer() first.")
    _active = tracer


def get_active_tracer() -> Tracer | None:
    """The one that was set; inside an attempt, one that records in it."""
    return _active or (Tracer() if current_trace() is not None else None)


def clear_active_tracer() -> None:
    """Forget the one that was set."""
    global _active
    _active = None


def with_active_tracer_context(function: Callable[..., Any]) -> Callable[..., Any]:
    """The tracer whose method this decorates is the active one while it runs."""

    @functools.wraps(function)
    def call(self: Tracer, *args: Any, **kwargs: Any) -> Any:
        set_active_tracer(self)
        try:
            return function(self, *args, **kwargs)
        finally:
            clear_active_tracer()

    return call


# ---- methods of `Tracer` ---------------------------------------------------------------------------------------------


@contextmanager
def lifespan(self: Tracer, store: LightningStore | None = None) -> Iterator[Tracer]:
    """`init` and `init_worker`, and at the end their opposites."""
    self.init()
    self.init_worker(0, store)
    try:
        yield self
    finally:
        self.teardown_worker(0)
        self.teardown()


def create_span(
    self: Tracer,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    timestamp: float | None = None,
    status: SpanStatus | None = None,
) -> Span:
    """A span without duration in the current trace. Outside of any it is made, and recorded nowhere."""
    trace = current_trace()
    at = time.time() if timestamp is None else timestamp
    span = _span(trace or Trace(), name, plain(attributes), at, at, status)
    if trace is not None:
        trace.add(span)
    return span


@contextmanager
def operation_context(
    self: Tracer,
    name: str,
    attributes: Mapping[str, Any] | None = None,
    start_time: float | None = None,
    end_time: float | None = None,
) -> Iterator[Recording]:
    """A span around what runs inside; an exception passes through and is recorded."""
    trace = current_trace()
    recording = Recording(trace or Trace(), name, plain(attributes), start_time)
    outside = otel_context.get_current()
    if trace is not None:
        otel_context.attach(trace.parent_context(recording.span_id, recording.trace_id))
    try:
        yield recording
    except BaseException as error:
        recording.record_exception(error)
        raise
    finally:
        otel_context.attach(outside)
        recording.end(end_time)
        if trace is not None:
            trace.add(recording.get_recorded_span())


def trace_run(self: Tracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function inside a trace."""
    from agentlightning.trainer.sync import run_sync

    async def inside() -> Any:
        async with self.trace_context():
            return function(*args, **kwargs)

    return run_sync(inside())


async def trace_run_async(self: Tracer, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Await a coroutine function inside a trace."""
    async with self.trace_context():
        return await function(*args, **kwargs)


def get_langchain_handler(self: Tracer, tags: list[str] | None = None) -> Any:
    """A callback handler that does nothing: the gateway records LangChain's calls. None without LangChain."""
    try:
        from langchain_core.callbacks import BaseCallbackHandler  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
    return BaseCallbackHandler()


def start_as_current_span(self: Trace, name: str, *args: Any, **kwargs: Any) -> Any:
    """What `trace_context` gave was a tracer of OpenTelemetry: a span around what runs inside."""
    return otel_trace.get_tracer("agentlightning").start_as_current_span(name, *args, **kwargs)


def start_span(self: Trace, name: str, *args: Any, **kwargs: Any) -> Any:
    """A span that is ended by who started it."""
    return otel_trace.get_tracer("agentlightning").start_span(name, *args, **kwargs)


def last_trace(self: Tracer) -> SpanTree:
    """The older name of `get_last_trace`."""
    return self.get_last_trace()


def visualize(self: SpanTree, filename: str = "trace_tree", interested_span_match: str | None = None) -> SpanTree:
    """Draw the tree to `filename`.svg; only spans whose names match, and what is around them, if a pattern is given."""
    shown = self if interested_span_match is None else _around(self, interested_span_match)
    shown.draw(f"{filename}.svg")
    return shown


def visualize_spans(
    self: Any, source: Sequence[Any], /, filename: str = "trace_tree", interested_span_match: str | None = None
) -> SpanTree:
    """The same for spans of the store or of the OpenTelemetry SDK."""
    spans = [span if isinstance(span, Span) else Span.from_opentelemetry(span, "none", "none") for span in source]
    return visualize(SpanTree(spans), filename, interested_span_match)


def _around(tree: SpanTree, pattern: str) -> SpanTree:
    by_id = {span.span_id: span for span in tree}
    kept: set[str] = set()
    for span in tree:
        at = span if re.search(pattern, span.name) else None
        while at is not None and at.span_id not in kept:
            kept.add(at.span_id)
            at = by_id.get(at.parent_id or "")
    return SpanTree(span for span in tree if span.span_id in kept)


class Recording:
    """A span that is going on."""

    def __init__(self, trace: Trace, name: str, attributes: dict[str, Any], start_time: float | None) -> None:
        self._trace = trace
        self._name = name
        self._attributes = attributes
        self._start = time.time() if start_time is None else start_time
        self._end: float | None = None
        self._status: SpanStatus | None = None
        self.span_id = random_hex(8)
        self.trace_id, self._parent_id = current_parent(trace)

    def record_exception(self, exception: BaseException) -> None:
        self._attributes.update(exception_attributes(exception))
        self._status = error_status(exception)

    def record_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._attributes.update(plain(attributes))

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        self._status = SpanStatus(status_code=status_code, description=description)

    def end(self, end_time: float | None) -> None:
        self._end = time.time() if end_time is None else end_time

    def get_recorded_span(self) -> Span:
        """The span as it is so far."""
        end = time.time() if self._end is None else self._end
        span = _span(self._trace, self._name, dict(self._attributes), self._start, end, self._status)
        update = {"span_id": self.span_id, "trace_id": self.trace_id, "parent_id": self._parent_id}
        return span.model_copy(update=update)


def _span(
    trace: Trace, name: str, attributes: dict[str, Any], start: float, end: float, status: SpanStatus | None
) -> Span:
    trace_id, parent_id = current_parent(trace)
    return Span.from_attributes(
        attributes=attributes,
        rollout_id=trace.rollout_id,
        attempt_id=trace.attempt_id,
        name=name,
        trace_id=trace_id,
        parent_id=parent_id,
        start_time=start,
        end_time=end,
        status=status,
    )
