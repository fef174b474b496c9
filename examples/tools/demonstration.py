"""A demonstration: what a model is asked, what it says turn by turn, and what its tools answer. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Demonstration:
    """A conversation with an agent's model; the last turn has no answer."""

    messages: list[dict[str, Any]]
    turns: tuple[str, ...]
    results: tuple[str, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list)
