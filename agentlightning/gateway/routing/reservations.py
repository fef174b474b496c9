"""What calls that are under way may use of the limits that all rollouts share, so that together they stay within them.

One attempt's calls count for at most half of what is left, however much they ask for: others need not wait for them.
Of attempts that ask for more than that there is one at a time, so what may be used beyond a limit is what one may use.
"""

from __future__ import annotations

from math import inf

from agentlightning.gateway.attempts import Key
from agentlightning.types.spending import Spent

_SHARE = 2
"""One part of so many, of what is left, is the most that counts for one attempt."""
_WITHOUT_LIMIT = 2**62


class Reservations:
    """What each attempt's open calls are expected to use, and what of it counts. A limit may be None."""

    def __init__(self, tokens: int | None, cost: float | None) -> None:
        self._most = Spent(tokens=_WITHOUT_LIMIT if tokens is None else tokens, cost=inf if cost is None else cost)
        self._open: dict[Key, Spent] = {}
        self._held: dict[Key, Spent] = {}
        self._together = Spent()
        self._beyond: Key | None = None
        """The attempt that asks for more than counts for it."""

    def expected_of(self, attempt: Key) -> Spent | None:
        """What the attempt's open calls are expected to use."""
        return self._open.get(attempt)

    def fits(self, attempt: Key, expected: Spent, total: Spent) -> bool:
        """Whether one more call fits beside the open ones. `total`: what has been used. One call alone always does:
        what it will use is not known.
        """
        if not self._open:
            return True
        own, share = self._open.get(attempt, Spent()) + expected, self._share(total)
        if self._beyond not in (None, attempt) and not _within(own, share):
            return False
        used = total + self._together - self._held.get(attempt, Spent())
        if _within(used + own, self._most):
            return True
        return attempt not in self._open and _within(used + _lesser(expected, share), self._most)

    def hold(self, attempt: Key, expected: Spent, total: Spent) -> None:
        """A call begins."""
        own = self._open[attempt] = self._open.get(attempt, Spent()) + expected
        before = self._held.get(attempt, Spent())
        counts = _lesser(own, self._share(total))
        held = Spent(calls=own.calls, tokens=max(before.tokens, counts.tokens), cost=max(before.cost, counts.cost))
        self._held[attempt] = held
        self._together += held - before
        if not _within(own, held):
            self._beyond = attempt

    def release(self, attempt: Key, expected: Spent) -> None:
        """It has ended, and what it used is part of the total."""
        own, before = self._open.pop(attempt) - expected, self._held.pop(attempt)
        if own.calls:
            self._open[attempt], self._held[attempt] = own, _lesser(own, before)
        self._together = self._together - before + self._held.get(attempt, Spent()) if self._open else Spent()
        if self._beyond == attempt and (not own.calls or _within(own, self._held[attempt])):
            self._beyond = None

    def _share(self, total: Spent) -> Spent:
        left = self._most - total
        return Spent(tokens=max(0, left.tokens // _SHARE), cost=max(0.0, left.cost / _SHARE))


def _within(amount: Spent, most: Spent) -> bool:
    return amount.tokens <= most.tokens and amount.cost <= most.cost


def _lesser(one: Spent, other: Spent) -> Spent:
    return Spent(calls=one.calls, tokens=min(one.tokens, other.tokens), cost=min(one.cost, other.cost))
