"""What calls of other providers used: how many they were, their tokens, and their cost where a price is known."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from agentlightning.types.names import COST
from agentlightning.types.span import Span


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What some calls used together. Sums are written with +, what is left of one with -."""

    calls: int = 0
    tokens: int = 0
    """Prompts and answers."""
    cost: float = 0.0
    """In the currency of the provider's price; 0 without a price."""

    def __add__(self, more: Spent) -> Spent:
        return Spent(calls=self.calls + more.calls, tokens=self.tokens + more.tokens, cost=self.cost + more.cost)

    def __sub__(self, part: Spent) -> Spent:
        return Spent(calls=self.calls - part.calls, tokens=self.tokens - part.tokens, cost=self.cost - part.cost)

    @classmethod
    def of_span(cls, span: Span) -> Spent:
        """What the span of one call tells."""
        known = span.attributes
        tokens = sum(known.get(f"gen_ai.usage.{kind}_tokens") or 0 for kind in ("input", "output"))
        return cls(calls=1, tokens=tokens, cost=known.get(COST) or 0.0)

    def words(self) -> str:
        """For people."""
        parts = [f"{self.calls:,} call{'' if self.calls == 1 else 's'}", f"{self.tokens:,} tokens"]
        return ", ".join([*parts, f"cost {self.cost:.4f}"] if self.cost else parts)


def spent_of(spans: Iterable[Span]) -> dict[str, Spent]:
    """What was asked of other providers among these spans, by the provider's alias."""
    found: dict[str, Spent] = {}
    for span in spans:
        if "agentlightning.response" in span.attributes:
            alias = str(span.attributes["gen_ai.provider.name"])
            found[alias] = found.get(alias, Spent()) + Spent.of_span(span)
    return found
