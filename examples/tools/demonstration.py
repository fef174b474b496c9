"""A demonstration: what a model is asked, what it says turn by turn, and what comes back. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Said:
    """What the user says in the middle of a conversation."""

    text: str

    def as_message(self) -> dict[str, str]:
        return {"role": "user", "content": self.text}


@dataclass(frozen=True)
class Demonstration:
    """A conversation with an agent's model; the last turn has no answer."""

    messages: list[dict[str, Any]]
    turns: tuple[str, ...]
    results: tuple[str | Said | Sequence[dict[str, Any]], ...] = ()
    """After each turn but the last: what a tool answered, what somebody said, or several messages."""
    tools: list[dict[str, Any]] = field(default_factory=list)

    def following(self) -> list[list[dict[str, Any]]]:
        """The results as messages."""
        return [_as_messages(result) for result in self.results]


def _as_messages(result: str | Said | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(result, str):
        return [{"role": "tool", "content": result}]
    return [result.as_message()] if isinstance(result, Said) else list(result)
