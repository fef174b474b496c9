"""The gateway: the only thing an agent talks to.

app        whose request it is, what will answer it      answer     the answer over HTTP: streams, disconnects
sampler    prompt → engine → message → record            session    token history of one attempt, branching
dialects/  the wire formats                              rendering  messages ↔ tokens
recorder   records → store, in batches                   restore    sessions from the store after a restart
routing    what names of models mean                     upstream   other providers
"""

from __future__ import annotations

from agentlightning.gateway.attempts import AttemptSummary
from agentlightning.gateway.gateway import Gateway
from agentlightning.gateway.rendering import Rendering, load_rendering
from agentlightning.gateway.routing import Frozen, Trained
from agentlightning.gateway.upstream import Provider

LLMProxy = Gateway
"""The same object under the name that other systems of this kind use."""

__all__ = ["AttemptSummary", "Frozen", "Gateway", "LLMProxy", "Provider", "Rendering", "Trained", "load_rendering"]
