"""Has a run's reward risen? A test for a rise in a noisy series. Pure.

Steps differ in their tasks and in what is sampled, so single steps tell nothing. The test compares every split of the
series into "before" and "after" and takes the one where they differ most: the likelihood-ratio statistic for one change
in the mean (Hawkins, J. Am. Stat. Assoc. 72, 1977), here for rises only. It finds a slow trend as well as a jump in the
first steps. The noise is taken from differences of neighbouring steps (von Neumann, Ann. Math. Stat. 12, 1941), so that
the rise itself does not count as noise. What is large is read off series of pure noise of the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from agentlightning.types.arrays import Float64Array, np

_SERIES = 2000
"""Series of noise that a statistic is compared with."""
_NEGLIGIBLE = 1e-9


def noise_of(rewards: Sequence[float]) -> float:
    """Standard deviation of a step's reward around the trend, whatever the trend is."""
    steps = np.diff(np.asarray(rewards, dtype=np.float64))
    return float(np.sqrt(np.mean(steps**2) / 2))


def chance_of_no_rise(rewards: Sequence[float]) -> float:
    """The p-value of the test: how often rewards without any trend look as if they had risen as much.

    Small: the reward has risen. It needs at least four rewards; rewards that are all equal give 1.
    """
    series = np.asarray(rewards, dtype=np.float64)
    if np.ptp(series) < _NEGLIGIBLE:
        return 1.0
    return float(np.mean(_under_no_trend(len(series)) >= _largest_rise(series[None])[0]))


def visible_rise(rewards: Sequence[float], level: float) -> float:
    """The smallest rise from the first to the second half of the steps that the test would find at this level."""
    critical = float(np.quantile(_under_no_trend(len(rewards)), 1 - level))
    return critical * noise_of(rewards) * 2 / float(np.sqrt(len(rewards)))


def _largest_rise(series_KN: Float64Array) -> Float64Array:
    """For each of K series of N steps: the largest standardised rise over all splits, shape [K]."""
    n = series_KN.shape[1]
    sums_KN = np.cumsum(series_KN, axis=1)
    before_N = np.arange(1, n)
    means = sums_KN[:, :-1] / before_N
    after = (sums_KN[:, -1:] - sums_KN[:, :-1]) / (n - before_N)
    noise_K = np.sqrt(np.mean(np.diff(series_KN, axis=1) ** 2, axis=1) / 2)
    rises_KN = (after - means) / np.sqrt(1 / before_N + 1 / (n - before_N))
    return rises_KN.max(axis=1) / np.maximum(noise_K, _NEGLIGIBLE)


@lru_cache(maxsize=16)
def _under_no_trend(steps: int) -> Float64Array:
    """The statistic of series of independent normal noise; the same in every process."""
    return _largest_rise(np.random.default_rng(0).standard_normal((_SERIES, steps)))
