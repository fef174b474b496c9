"""Confidence intervals for means of rewards. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def mean_interval(rewards: Sequence[float], level: float = 0.95, draws: int = 4000) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron & Tibshirani 1993, ch. 13); the same for the same rewards."""
    values = np.asarray(rewards, dtype=np.float64)
    samples = np.random.default_rng(0).choice(values, size=(draws, len(values))).mean(axis=1)
    tail = (1.0 - level) / 2
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return float(low), float(high)


def paired_difference(
    before: Sequence[float], after: Sequence[float], level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Mean of after − before on the same tasks, with its interval."""
    difference = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    return float(difference.mean()), mean_interval(difference.tolist(), level)
