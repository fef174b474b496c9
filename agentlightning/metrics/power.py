"""What difference so many tasks can show, said before anything is spent. Pure.

Rewards of 0 and 1 are assumed. How far they vary from task to task decides: most where the two that are compared earn
independently of each other (two draws of a model), least where the better one never loses a task that the other wins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from random import Random

POWER = 0.8
"""A difference counts as visible when it is shown in four of five cases."""
_GAINS = [0.02 * n for n in range(1, 51)]
_CASES = 100
"""Cases that are drawn for each gain that is looked at."""
_MANY = 400
"""With more tasks than this, the smallest gain shrinks with the root of their number."""
Detects = Callable[[Sequence[float]], bool]
"""Whether differences of rewards, one for each task, are enough to say that there is one."""


def visible_gain(tasks: int, detects: Detects, *, repeats: int = 1, never_loses: bool = False) -> float | None:
    """The smallest gain that `detects` finds with a chance of `POWER`; None where the tasks are too few for any.

    `repeats` is how many rollouts each task has of each of the two. The same numbers are drawn for each gain.
    """

    if tasks > _MANY:
        found = visible_gain(_MANY, detects, repeats=repeats, never_loses=never_loses)
        return found and round(found * (_MANY / tasks) ** 0.5, 2)

    def is_found(gain: float) -> bool:
        random = Random(0)
        cases = (_differences(random, tasks, gain, repeats, never_loses) for _ in range(_CASES))
        return sum(map(detects, cases)) >= POWER * _CASES

    first = bisect_left(_GAINS, True, key=is_found)
    return _GAINS[first] if first < len(_GAINS) else None


def _differences(random: Random, tasks: int, gain: float, repeats: int, never_loses: bool) -> list[float]:
    if repeats > 1:
        variance = gain * (1 - gain) if never_loses else (1 - gain**2) / 2
        drawn = (random.gauss(gain, (variance / repeats) ** 0.5) for _ in range(tasks))
        return [min(max(d, -1.0), 1.0) for d in drawn]
    if never_loses:
        return [float(random.random() < gain) for _ in range(tasks)]
    return [(random.random() < (1 + gain) / 2) - float(random.random() < (1 - gain) / 2) for _ in range(tasks)]


def power_words(tasks: int, detects: Detects, repeats: int = 1) -> str:
    """A sentence for people: the gain that so many validation tasks can show."""
    independent = visible_gain(tasks, detects, repeats=repeats)
    at_best = visible_gain(tasks, detects, repeats=repeats, never_loses=True)
    if at_best is None:
        return f"{tasks} tasks are too few to show any difference."
    usual = "no difference" if independent is None else f"+{independent:.2f} or more"
    return (
        f"{tasks} tasks can show a difference of {usual} in four of five cases (of +{at_best:.2f} where the better one "
        "never loses a task); a smaller one will mostly look like chance."
    )
