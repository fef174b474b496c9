"""Estimates from rewards of several rollouts per task: intervals of means, and the best of k. Pure, without numpy, as
models elsewhere are evaluated without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from statistics import NormalDist, fmean, stdev

_MANY = 1000
"""From so many rewards on their mean is as good as normally distributed, and drawing again would only take longer."""


def mean_interval(rewards: Sequence[float], level: float = 0.95, draws: int = 4000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron & Tibshirani 1993, ch. 13); the same for the same rewards."""
    values = [float(reward) for reward in rewards]
    tail = (1.0 - level) / 2
    if len(values) >= _MANY:
        mean = NormalDist(fmean(values), max(stdev(values), 1e-300) / len(values) ** 0.5)
        return mean.inv_cdf(tail), mean.inv_cdf(1.0 - tail)
    random = Random(0)
    means = sorted(sum(random.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return _quantile(means, tail), _quantile(means, 1.0 - tail)


def paired_difference(
    before: Sequence[float], after: Sequence[float], level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Mean of after − before on the same tasks, with its interval."""
    differences = [float(b) - float(a) for a, b in zip(before, after, strict=True)]
    return fmean(differences), mean_interval(differences, level)


def expected_best(rewards: Sequence[float], k: int) -> float:
    """The highest reward to be expected of k rollouts of a task, estimated without bias from n ≥ k of them.

    The mean over all subsets of k: the i-th smallest of n is the largest of C(i − 1, k − 1) of C(n, k). For rewards of
    0 and 1 that is pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1).
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} needs at least {k} rewards, and one; there are {n}")
    return sum(math.comb(i, k - 1) / math.comb(n, k) * r for i, r in enumerate(sorted(rewards)))


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Between the two nearest, in proportion."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
