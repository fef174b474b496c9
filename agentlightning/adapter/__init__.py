"""Pure functions over what was recorded: spans and calls → token trees, triplets, messages, tool outcomes."""

from agentlightning.adapter.messages import TraceToMessages
from agentlightning.adapter.triplets import LlmProxyTraceToTriplet, TracerTraceToTriplet

__all__ = ["LlmProxyTraceToTriplet", "TraceToMessages", "TracerTraceToTriplet"]
