"""Base classes of adapters that people wrote for themselves, and the words that adapters took."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Generic, TypedDict, TypeVar

from agentlightning.errors import ConfigError
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
    """How rewards that name no response find their model calls: `TracerTraceToTriplet(reward_match=…)`."""

    FIRST_OCCURRENCE = "first_occurrence"
    FIRST_SIBLING = "first_sibling"


class OpenAIMessages(TypedDict, total=False):
    """A conversation as `TraceToMessages` gives it."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None


def adapt(self: Any, source: Any, /) -> Any:
    """Adapters could be called."""
    return self.adapt(source)


def skip_empty_token_spans(arguments: dict[str, Any], value: bool) -> None:
    """`_skip_empty_token_spans=True` is refused: silence about calls without tokens hides that none is trained."""
    if value:
        raise ConfigError(
            "_skip_empty_token_spans=True: calls whose tokens nobody recorded are given with their texts. Leave out "
            "those that you do not want: [t for t in triplets if t.response.get('token_ids')]."
        )
