"""Tracers: what happens inside an in-process agent, as spans of its attempt."""

from agentlightning.tracer.base import Tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import OtelTracer, route_spans_of
from agentlightning.tracer.trace import Trace, current_trace

__all__ = ["DummyTracer", "OtelTracer", "Trace", "Tracer", "current_trace", "route_spans_of"]
