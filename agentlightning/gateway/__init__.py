"""The gateway: the only thing an agent talks to.

app        HTTP: attribution, streams, disconnects        dialects/  the wire formats
session    token history of one attempt, branching        rendering  messages ↔ tokens
sampler    prompt → engine → message → record             recorder   records → store, in batches
"""

from __future__ import annotations

from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.rendering import Rendering, load_rendering

LLMProxy = Gateway
"""The same object under the name that other systems of this kind use."""

__all__ = ["AttemptSummary", "Gateway", "LLMProxy", "Rendering", "load_rendering"]
