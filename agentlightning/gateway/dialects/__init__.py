"""The wire formats the gateway speaks."""

from __future__ import annotations

from agentlightning.gateway.dialects.base import Dialect
from agentlightning.gateway.dialects.chat import ChatDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(),)

__all__ = ["DIALECTS", "Dialect"]
