"""The wire formats the gateway speaks."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Dialect
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.dialects.completions import CompletionsDialect
from agentlightning.gateway.dialects.embeddings import EmbeddingsDialect
from agentlightning.gateway.dialects.gemini import GeminiDialect
from agentlightning.gateway.dialects.messages import MessagesDialect
from agentlightning.gateway.dialects.paths import Paths, Route
from agentlightning.gateway.dialects.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),
    ResponsesDialect(),
    MessagesDialect(),
    GeminiDialect(),
    CompletionsDialect(),
)
FORWARDED: tuple[Dialect, ...] = (EmbeddingsDialect(),)
"""What only other providers answer; always there."""


__all__ = ["DIALECTS", "FORWARDED", "Dialect", "Paths", "Route"]
