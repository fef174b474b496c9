"""Estimates from rewards of several tasks: intervals of means, the best of k, and the difference that so many tasks can
show, which is said before anything is spent. Pure, and without numpy, as models behind other servers are evaluated
without it.

`scripts/calibration.py` measures how often the intervals hold. Visible differences assume rewards of 0 and 1. They
depend on how far rewards vary from task to task: most where the two that are compared earn independently of each other
(two draws of a model), least where the better one never loses a task that the other wins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from statistics import NormalDist, fmean

from agentlightning.types.finding import counted

Bounds = tuple[float, float]
_COMMON_BOUNDS: Sequence[Bounds] = ((0.0, 1.0), (-1.0, 1.0))
_HALVINGS = 36
_DISTINCT = 500
"""The most different values that are looked at. If there are more, each is rounded down to one of so many steps."""
_NORMAL = NormalDist()


def bounds_of(rewards: Sequence[float]) -> Bounds:
    """The range of rewards: 0 to 1 or −1 to 1 where all lie in it, otherwise their extremes and 0."""
    low, high = min(*rewards, 0.0), max(*rewards, 0.0)
    return next((b for b in _COMMON_BOUNDS if b[0] <= low and high <= b[1]), (low, high))


def mean_interval(values: Sequence[float], level: float = 0.95, bounds: Bounds | None = None) -> Bounds:
    """An interval that holds the mean with a probability of at least `level`; `values` has one number per task.

    The rollouts of a task belong together, so their mean is one value. `bounds` are the lowest and the highest reward
    there can be (`bounds_of` the values unless given). For values of 0 and 1 this is the interval of Clopper & Pearson
    (Biometrika 26, 1934), which never holds less often than it says, and more often with few tasks. For other values it
    is the bound of Gaffke (2005; Learned-Miller & Thomas, arXiv 1905.06208), which is that one made general: weights
    are drawn evenly from all that sum to 1, and one task more is taken to have earned the worst there can be. No case
    is known in which it holds less often than it says, and none is proven. Where rewards have no bounds, their extremes
    stand for them, and the level is that of many tasks.
    """
    low, high = bounds or bounds_of(values)
    counts = Counter(float(min(max(value, low), high)) for value in values)
    tail = (1.0 - level) / 2
    mirrored = Counter({-value: count for value, count in counts.items()})
    return _lower(_fewer(counts, low, high), low, tail), -_lower(_fewer(mirrored, -high, -low), -high, tail)


def is_positive(differences: Sequence[float], level: float = 0.95, width: float = 1.0) -> bool:
    """Whether the interval of the mean of differences, each within ±`width`, lies above 0."""
    points = Counter(map(float, differences))
    points[-width] += 1
    return _share_below(points, 0.0) < (1.0 - level) / 2


def widened(mean: float, interval: Bounds, looks: int, level: float = 0.95) -> Bounds:
    """The interval of the best of `looks` means, from the one that it would have if there were no others.

    All of them hold together with `level` if each holds with 1 − (1 − level) / looks (Bonferroni), so the best one does
    too. Each half grows as that of a normal mean does, and leaves 0 to 1 only where the interval did.
    """
    tail = (1.0 - level) / 2
    factor = _NORMAL.inv_cdf(tail / max(looks, 1)) / _NORMAL.inv_cdf(tail)
    low, high = mean + factor * (interval[0] - mean), mean + factor * (interval[1] - mean)
    lowest, highest = bounds_of(interval)
    return max(low, lowest), min(high, highest)


def paired_difference(
    before: Sequence[float], after: Sequence[float], level: float = 0.95, bounds: Bounds | None = None
) -> tuple[float, Bounds]:
    """Mean of after − before on the same tasks, with its interval. `bounds` are those of the rewards."""
    differences = [float(b) - float(a) for a, b in zip(before, after, strict=True)]
    low, high = bounds or bounds_of([*before, *after])
    return fmean(differences), mean_interval(differences, level, (low - high, high - low))


def expected_best(rewards: Sequence[float], k: int) -> float:
    """The highest reward to be expected of k rollouts of a task, estimated without bias from n ≥ k of them.

    The mean over all subsets of k: the i-th smallest of n is the largest of C(i − 1, k − 1) of C(n, k). For rewards of
    0 and 1 that is pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1).
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} needs at least {k} rewards, and one; there are {n}")
    return sum(math.comb(i, k - 1) / math.comb(n, k) * r for i, r in enumerate(sorted(rewards)))


def _fewer(counts: Mapping[float, int], low: float, high: float) -> Mapping[float, int]:
    if len(counts) <= _DISTINCT:
        return counts
    found: Counter[float] = Counter()
    for value, count in counts.items():
        found[low + math.floor((value - low) / (high - low) * _DISTINCT) / _DISTINCT * (high - low)] += count
    return found


def _lower(counts: Mapping[float, int], lowest: float, tail: float) -> float:
    """The value below which a weighted mean lies with probability `tail`, with one task more that earned `lowest`."""
    points = Counter(counts)
    points[lowest] += 1
    low, high = lowest, max(points)
    if low == high:
        return lowest
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _share_below(points, middle) < tail:
            low = middle
        else:
            high = middle
    return low


def _share_below(points: Mapping[float, int], threshold: float) -> float:
    """P(Σ w x ≤ threshold) for evenly drawn weights w that sum to 1: that of Σ E (x − threshold) ≤ 0, E exponential.

    A saddlepoint approximation (Barndorff-Nielsen, Biometrika 73, 1986), which is off by 4 % of a small probability at
    most, and towards wider intervals where it is off by most.
    """
    gaps = [(x - threshold, n) for x, n in points.items()]
    least, most = min(gap for gap, _ in gaps), max(gap for gap, _ in gaps)
    if least >= 0 or most <= 0:
        return float(most <= 0)
    low, high = 1 / least, 1 / most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if sum(n * gap / (1 - middle * gap) for gap, n in gaps) < 0:
            low = middle
        else:
            high = middle
    saddle = (low + high) / 2
    exponent = sum(n * math.log1p(-saddle * gap) for gap, n in gaps)
    curvature = sum(n * (gap / (1 - saddle * gap)) ** 2 for gap, n in gaps)
    root = math.copysign(math.sqrt(max(2 * exponent, 0.0)), saddle)
    scaled = saddle * math.sqrt(curvature)
    return 0.5 if abs(root) < 1e-4 else _NORMAL.cdf(root + math.log(scaled / root) / root)


POWER = 0.8
"""A difference counts as visible when it is shown in four of five cases."""
_GAINS = [0.02 * n for n in range(1, 51)]
_CASES = 100
"""Cases that are drawn for each gain that is looked at."""
_MANY = 400
"""With more tasks than this, the smallest gain shrinks with the root of their number."""
_Detects = Callable[[Sequence[float]], bool]
"""Whether differences of rewards, one for each task, are enough to call the two different."""


def visible_gain(tasks: int, detects: _Detects, *, repeats: int = 1, never_loses: bool = False) -> float | None:
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


def power_words(tasks: int, detects: _Detects, repeats: int = 1) -> str:
    """A sentence for people: the gain that so many validation tasks can show."""
    independent = visible_gain(tasks, detects, repeats=repeats)
    at_best = visible_gain(tasks, detects, repeats=repeats, never_loses=True)
    if at_best is None:
        return f"{counted(tasks, 'task is', 'tasks are')} too few to show any difference."
    usual = "no difference" if independent is None else f"+{independent:.2f} or more"
    return (
        f"{counted(tasks, 'task')} can show a difference of {usual} in four of five cases (of +{at_best:.2f} "
        "where the better one "
        "never loses a task); a smaller one will mostly look like chance."
    )
