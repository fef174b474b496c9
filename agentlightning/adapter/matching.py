"""What the spans of an attempt belong to where they do not say it themselves: rewards to calls, calls to the spans
around them, and calls to the earlier calls that they continue. Pure.

A reward that names its response needs none of this. Matching messages takes time in proportion to the messages, not to
the pairs of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from agentlightning.types import Span
from agentlightning.types.names import OPERATION, OPERATION_NAME, REWARD
from agentlightning.types.reward import find_final_reward, get_reward_value

RewardMatch = Literal["last", "first_occurrence", "first_sibling"]


def _last(calls: Sequence[Span], spans: Sequence[Span]) -> dict[int, float]:
    """The final reward belongs to the last call."""
    final = find_final_reward(spans)
    return {} if final is None or not calls else {len(calls) - 1: final}


def _first_occurrence(calls: Sequence[Span], spans: Sequence[Span]) -> dict[int, float]:
    """Each reward belongs to the latest call that had ended when it was given and has none yet."""
    found: dict[int, float] = {}
    for reward, value in _rewards(spans):
        before = [
            i for i, c in enumerate(calls) if i not in found and (c.end_time or 0.0) <= (reward.start_time or 0.0)
        ]
        if before:
            found[max(before, key=lambda i: calls[i].start_time or 0.0)] = value
    return found


def _first_sibling(calls: Sequence[Span], spans: Sequence[Span]) -> dict[int, float]:
    """As `_first_occurrence`, among the calls and rewards that have the same parent."""
    found: dict[int, float] = {}
    for parent in dict.fromkeys(span.parent_id for span, _ in _rewards(spans)):
        here = [i for i, call in enumerate(calls) if call.parent_id == parent]
        own = _first_occurrence([calls[i] for i in here], [s for s in spans if s.parent_id == parent])
        found |= {here[i]: value for i, value in own.items()}
    return found


MATCHES: Mapping[RewardMatch, Callable[[Sequence[Span], Sequence[Span]], dict[int, float]]] = {
    "last": _last,
    "first_occurrence": _first_occurrence,
    "first_sibling": _first_sibling,
}
"""(the calls' spans, all spans) → the reward of each call by its number."""


def _rewards(spans: Sequence[Span]) -> list[tuple[Span, float]]:
    """The spans that carry a reward, in the order in which it was given."""
    valued = [(span, value) for span in spans if (value := get_reward_value(span)) is not None]
    return sorted(valued, key=lambda one: (one[0].start_time or 0.0, one[0].sequence_id))


def is_in_reward(span: Span, by_id: Mapping[str, Span]) -> bool:
    """Whether a span around it gives a reward: such a model call is a judge's."""
    at = by_id.get(span.parent_id or "")
    for _ in range(len(by_id)):
        if at is None:
            return False
        if get_reward_value(at) is not None or (at.name == OPERATION and at.attributes.get(OPERATION_NAME) == REWARD):
            return True
        at = by_id.get(at.parent_id or "")
    return False


def below_what_encloses(loose: Sequence[Span], spans: Sequence[Span]) -> dict[str, Span]:
    """Spans that hang in the air, each below the smallest span that encloses it in time; by their ids.

    A span hangs in the air that has no parent, or the one root alone, as frameworks leave it that trace in several
    ways. What nothing encloses stays as it is.
    """
    known = {span.span_id for span in spans}
    roots = {span.span_id for span in spans if span.parent_id not in known}
    top = roots if len(roots) == 1 else set[str]()
    found: dict[str, Span] = {}
    for span in loose:
        hangs = span.parent_id in top if top else span.parent_id not in known
        if around := [s for s in spans if hangs and s.span_id not in top and _encloses(s, span)]:
            closest = min(around, key=lambda s: (s.end_time or 0.0) - (s.start_time or 0.0))
            span = span.model_copy(update={"parent_id": closest.span_id})
        found[span.span_id] = span
    return found


def _encloses(outer: Span, inner: Span) -> bool:
    if None in (outer.start_time, outer.end_time, inner.start_time, inner.end_time) or outer is inner:
        return False
    starts = (inner.start_time or 0.0) - (outer.start_time or 0.0)
    ends = (outer.end_time or 0.0) - (inner.end_time or 0.0)
    return starts >= 0 and ends >= 0 and starts + ends > 0


class MessagePlaces(NamedTuple):
    """Where a call stands in a `MessageTree`."""

    prompt: Sequence[int]
    """The places of its messages, in their order."""
    end: int
    """The place of its answer."""


class MessageTree:
    """What calls said, each message as a text below the one before it. What begins alike has the same places."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], int] = {}

    def add(self, prompt: Iterable[str], answer: str) -> MessagePlaces:
        """The places of a call's messages and of its answer."""
        places = [0]
        for text in (*prompt, answer):
            places.append(self._places.setdefault((places[-1], text), len(self._places) + 1))
        return MessagePlaces(places[1:-1], places[-1])
