"""The wire formats the gateway speaks."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Dialect
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.dialects.completions import CompletionsDialect
from agentlightning.gateway.dialects.messages import MessagesDialect
from agentlightning.gateway.dialects.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), MessagesDialect(), CompletionsDialect())

__all__ = ["DIALECTS", "Dialect"]
