"""`agentlightning.utils` was a package of modules; see `otel` and the table. What they had besides."""

from __future__ import annotations

from agentlightning.types.ids import random_hex

__all__: list[str] = []


def generate_id(length: int) -> str:
    """So many random hexadecimal digits."""
    return random_hex((length + 1) // 2)[:length]
