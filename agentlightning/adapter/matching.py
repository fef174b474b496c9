"""What the spans of an attempt belong to where they do not say it themselves: rewards to calls, calls to the spans
around them, and calls to the earlier calls that they continue. Pure.

A reward that names its response needs none of this. An agent may report any number of spans: nothing takes time in
proportion to their pairs.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
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
    by_end = sorted((call.end_time or 0.0, i) for i, call in enumerate(calls))
    free: list[tuple[float, int]] = []
    """The calls that had ended, the latest first."""
    ended = 0
    for reward, value in _rewards(spans):
        while ended < len(by_end) and by_end[ended][0] <= (reward.start_time or 0.0):
            at = by_end[ended][1]
            heapq.heappush(free, (-(calls[at].start_time or 0.0), at))
            ended += 1
        if free:
            found[heapq.heappop(free)[1]] = value
    return found


def _first_sibling(calls: Sequence[Span], spans: Sequence[Span]) -> dict[int, float]:
    """As `_first_occurrence`, among the calls and rewards that have the same parent."""
    found: dict[int, float] = {}
    here: dict[str | None, list[int]] = defaultdict(list)
    for i, call in enumerate(calls):
        here[call.parent_id].append(i)
    rewards: dict[str | None, list[Span]] = defaultdict(list)
    for span, _ in _rewards(spans):
        rewards[span.parent_id].append(span)
    for parent, given in rewards.items():
        own = _first_occurrence([calls[i] for i in here[parent]], given)
        found |= {here[parent][i]: value for i, value in own.items()}
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


def is_in_reward(span: Span, by_id: Mapping[str, Span], known: dict[str, bool]) -> bool:
    """Whether a span around it gives a reward: such a model call is a judge's.

    known: of spans, whether they or one around them give one; what is found out is added.
    """
    passed: list[str] = []
    at = by_id.get(span.parent_id or "")
    while at is not None and at.span_id not in known:
        known[at.span_id] = get_reward_value(at) is not None or (
            at.name == OPERATION and at.attributes.get(OPERATION_NAME) == REWARD
        )
        if known[at.span_id]:
            break
        passed.append(at.span_id)
        at = by_id.get(at.parent_id or "")
    inside = at is not None and known[at.span_id]
    known |= dict.fromkeys(passed, inside)
    return inside


def below_what_encloses(loose: Sequence[Span], spans: Sequence[Span]) -> dict[str, Span]:
    """Spans that hang in the air, each below the smallest span that encloses it in time; by their ids.

    A span hangs in the air that has no parent, or the one root alone, as frameworks leave it that trace in several
    ways. What nothing encloses stays as it is.
    """
    known = {span.span_id for span in spans}
    roots = {span.span_id for span in spans if span.parent_id not in known}
    top = roots if len(roots) == 1 else set[str]()
    hanging = [s for s in loose if (s.parent_id in top if top else s.parent_id not in known)]
    around = [s for s in spans if s.span_id not in top]
    found = {span.span_id: span for span in loose}
    for span, closest in zip(hanging, _closest(hanging, around), strict=True):
        if closest is not None:
            found[span.span_id] = span.model_copy(update={"parent_id": closest.span_id})
    return found


def _closest(inner: Sequence[Span], outer: Sequence[Span]) -> list[Span | None]:
    """Of each inner span the smallest outer one that encloses it and is larger."""
    bounds, inners = [_times(s) for s in outer], [_times(s) for s in inner]
    ends = _Ends([times[1] for times in bounds if times is not None])
    events = [(times[0], 1, n) for n, times in enumerate(bounds) if times is not None]
    events += [(times[0], kind, n) for n, times in enumerate(inners) if times is not None for kind in (0, 2)]
    found = [(math.inf, -1)] * len(inner)
    for start, kind, n in sorted(events):
        times = (bounds if kind == 1 else inners)[n]
        assert times is not None
        if kind == 1:
            ends.add(times[1], (times[1] - start, n))
        else:  # what begins before it may end with it, and what begins with it may not
            found[n] = min(found[n], ends.least(times[1], beyond=kind == 2))
    return [outer[n] if n >= 0 else None for _, n in found]


def _times(span: Span) -> tuple[float, float] | None:
    if span.start_time is None or span.end_time is None or not math.isfinite(span.start_time + span.end_time):
        return None
    return span.start_time, span.end_time


class _Ends:
    """The smallest of what ends at a time or later, in logarithmic time (a Fenwick tree from the latest end)."""

    def __init__(self, ends: Sequence[float]) -> None:
        self._ends = sorted(set(ends))
        self._least = [(math.inf, -1)] * (len(self._ends) + 1)

    def add(self, end: float, value: tuple[float, int]) -> None:
        at = len(self._ends) - bisect_left(self._ends, end)
        while at < len(self._least):
            self._least[at] = min(self._least[at], value)
            at += at & -at

    def least(self, end: float, *, beyond: bool) -> tuple[float, int]:
        """`beyond`: only of what ends later."""
        at = len(self._ends) - (bisect_right if beyond else bisect_left)(self._ends, end)
        found = (math.inf, -1)
        while at > 0:
            found = min(found, self._least[at])
            at -= at & -at
        return found


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
