"""The wire formats the gateway speaks."""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.errors import ConfigError
from agentlightning.gateway.dialects.base import Dialect
from agentlightning.gateway.dialects.chat import ChatDialect
from agentlightning.gateway.dialects.completions import CompletionsDialect
from agentlightning.gateway.dialects.embeddings import EmbeddingsDialect
from agentlightning.gateway.dialects.messages import MessagesDialect
from agentlightning.gateway.dialects.responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), MessagesDialect(), CompletionsDialect())
FORWARDED: tuple[Dialect, ...] = (EmbeddingsDialect(),)
"""What only other providers answer; always there."""


def by_path(dialects: Sequence[Dialect]) -> dict[str, Dialect]:
    """Which dialect a path speaks. Raises `ConfigError` if two claim the same."""
    found: dict[str, Dialect] = {}
    for dialect in dialects:
        for path in (*dialect.paths, *dialect.counting_paths):
            if path in found:
                raise ConfigError(f"The dialects '{found[path].name}' and '{dialect.name}' both have the path {path}.")
            found[path] = dialect
    return found


__all__ = ["DIALECTS", "FORWARDED", "Dialect", "by_path"]
