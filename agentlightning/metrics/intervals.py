"""Estimates from rewards of several tasks: intervals of means, and the best of k. Pure, without numpy, as models behind
other servers are evaluated without it.

`scripts/calibration.py` measures how often the intervals hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean

Bounds = tuple[float, float]
_COMMON_BOUNDS: Sequence[Bounds] = ((0.0, 1.0), (-1.0, 1.0))
_HALVINGS = 36
_DISTINCT = 500
"""So many different values are looked at; of more, each is taken for the next lower of as many steps."""
_NORMAL = NormalDist()


def bounds_of(rewards: Sequence[float]) -> Bounds:
    """Between which values rewards lie: 0 to 1 or −1 to 1 where those hold all of them, else their extremes and 0."""
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
