"""Estimates from rewards of several rollouts per task: intervals of means, and the best of k. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

_AT_ONCE = 1 << 22
"""Values that are drawn at the same time."""


def mean_interval(rewards: Sequence[float], level: float = 0.95, draws: int = 4000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron & Tibshirani 1993, ch. 13); the same for the same rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    rng, rows = np.random.default_rng(0), max(_AT_ONCE // len(values), 1)
    blocks = [min(rows, draws - start) for start in range(0, draws, rows)]
    samples = np.concatenate([rng.choice(values, size=(n, len(values))).mean(axis=1) for n in blocks])
    tail = (1.0 - level) / 2
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return float(low), float(high)


def paired_difference(
    before: Sequence[float], after: Sequence[float], level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Mean of after − before on the same tasks, with its interval."""
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    return float(difference.mean()), mean_interval(difference.tolist(), level)


def expected_best(rewards: Sequence[float], k: int) -> float:
    """The highest reward to be expected of k rollouts of a task, estimated without bias from n ≥ k of them.

    The mean over all subsets of k: the i-th smallest of n is the largest of C(i − 1, k − 1) of C(n, k). For rewards of
    0 and 1 that is pass@k = 1 − C(n − c, k) / C(n, k) (Chen et al., arXiv 2107.03374, eq. 1).
    """
    n = len(rewards)
    if not 1 <= k <= n:
        raise ValueError(f"the best of {k} needs at least {k} rewards, and one; there are {n}")
    return sum(math.comb(i, k - 1) / math.comb(n, k) * r for i, r in enumerate(sorted(rewards)))
