"""Tracers: what happens inside an in-process agent, as spans of its attempt."""

from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.tracer.attribution import GATEWAY_URL, instrument, uninstrument
from agentlightning.tracer.base import Tracer
from agentlightning.tracer.dummy import DummyTracer
from agentlightning.tracer.otel import OtelTracer, current_agent_name, route_spans_of
from agentlightning.tracer.trace import GatewayAccess, ToolReplay, Trace, current_trace
from agentlightning.tracer.tree import SpanTree
from agentlightning.tracer.weave import WeaveTracer

__all__ = [
    "GATEWAY_URL",
    "AgentOpsTracer",
    "DummyTracer",
    "GatewayAccess",
    "OtelTracer",
    "SpanTree",
    "ToolReplay",
    "Trace",
    "Tracer",
    "WeaveTracer",
    "current_agent_name",
    "current_trace",
    "instrument",
    "route_spans_of",
    "uninstrument",
]
