"""Has a run's reward risen, or fallen from where it was? Tests for a rise and a fall in a noisy series. Pure.

Steps differ in their tasks and in what is sampled, so single steps tell nothing. The test compares every split of the
series into "before" and "after" and takes the one where they differ most: the likelihood-ratio statistic for one change
in the mean (Hawkins, J. Am. Stat. Assoc. 72, 1977), in one direction. It finds a slow trend as well as a jump in the
first steps. The noise is taken from differences of neighbouring steps (von Neumann, Ann. Math. Stat. 12, 1941), so that
the rise itself does not count as noise. What is large is read off series of pure noise of the same length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from agentlightning.types.arrays import Float64Array, np

_SERIES = 2000
"""Series of noise that a statistic is compared with."""
_NEGLIGIBLE = 1e-9
_WINDOW = 4
"""Steps that make a level of the reward: their mean."""
_FALL_LEVEL = 0.01
_LARGE_FALL = 0.2
"""A fall is large from this share of the range of rewards on."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A reward that was higher before."""

    best: float
    """The mean of the best four steps in a row …"""
    since: int
    """… the last of which was so many steps ago,"""
    now: float
    """and the mean of the last four."""


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


def fall_of(rewards: Sequence[float], spread: float) -> Fall | None:
    """Whether the reward has fallen from its best, by the same test, and by a large part of `spread`, the range of what
    rollouts earn. It needs eight steps.

    None of 200 recorded runs that learned is accused after any of its steps (`tests/algorithm/test_recorded_runs.py`).
    """
    if len(rewards) < 2 * _WINDOW:
        return None
    levels = np.convolve(np.asarray(rewards, dtype=np.float64), np.full(_WINDOW, 1 / _WINDOW), mode="valid")
    before = levels[:-_WINDOW]
    best, now = float(before.max()), float(levels[-1])
    if best - now <= _LARGE_FALL * spread or chance_of_no_rise([-r for r in rewards]) > _FALL_LEVEL:
        return None
    return Fall(best, len(levels) - 1 - int(before.argmax()), now)


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
