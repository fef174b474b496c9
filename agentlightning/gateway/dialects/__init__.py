"""The wire formats the gateway speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentlightning.gateway.dialects.base import Dialect, DialectRoute, Paths
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.dialects.completions import CompletionsDialect
from agentlightning.gateway.dialects.embeddings import EmbeddingsDialect
from agentlightning.gateway.dialects.gemini import GeminiDialect
from agentlightning.gateway.dialects.messages import MessagesDialect
from agentlightning.gateway.dialects.responses import ResponsesDialect
from agentlightning.gateway.exchange import Refusal

DIALECTS: tuple[Dialect, ...] = (
    ChatDialect(),
    ResponsesDialect(),
    MessagesDialect(),
    GeminiDialect(),
    CompletionsDialect(),
)
FORWARDED: tuple[Dialect, ...] = (EmbeddingsDialect(),)
"""What only other providers answer; always there."""


def refused_in_shape(refusal: Refusal, scope: Mapping[str, Any]) -> bytes:
    """An error that belongs to no dialect's path, in the shape that its client reads, which its headers tell."""
    headers = dict(scope["headers"])
    if b"anthropic-version" in headers:
        return MessagesDialect().refuse(refusal)
    return (GeminiDialect() if b"x-goog-api-key" in headers else ChatDialect()).refuse(refusal)


__all__ = ["DIALECTS", "FORWARDED", "Dialect", "DialectRoute", "Paths", "refused_in_shape"]
