"""Base classes of adapters that people wrote for themselves, and the words that adapters took."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Generic, TypedDict, TypeVar

from agentlightning.types import Span, Triplet

From = TypeVar("From")
To = TypeVar("To")


class Adapter(Generic[From, To]):
    """Turns what was recorded into what an algorithm reads; calling one is `adapt`."""

    def __call__(self, source: From, /) -> To:
        return self.adapt(source)

    def adapt(self, source: From, /) -> To:
        raise NotImplementedError(f"{type(self).__name__} does not override adapt.")


class TraceAdapter(Adapter[Sequence[Span], To]):
    """Reads spans of the store."""


class OtelTraceAdapter(Adapter[Sequence[Any], To]):
    """Reads spans of the OpenTelemetry SDK."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """Gives triplets."""


class RewardMatchPolicy(StrEnum):
    """How rewards found their model calls. Today a reward names the response it is for, or belongs to the last one."""

    FIRST_OCCURRENCE = "first_occurrence"
    FIRST_SIBLING = "first_sibling"


class OpenAIMessages(TypedDict, total=False):
    """A conversation as `TraceToMessages` gives it."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


def adapt(self: Any, source: Any, /) -> Any:
    """Adapters could be called."""
    return self.adapt(source)
