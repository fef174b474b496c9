"""A tracer without OpenTelemetry: it records what the agent emits and nothing else."""

from __future__ import annotations

from agentlightning.tracer.base import Tracer


class DummyTracer(Tracer):
    """For agents whose calls the gateway records and that need no further tracing. Rewards and messages are kept."""
