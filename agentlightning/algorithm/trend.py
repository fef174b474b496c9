"""Has a run's reward risen, or fallen from where it was? Tests for a rise and a fall in a noisy series. Pure.

Steps differ in their tasks and in what is sampled, so single steps tell nothing. The test compares every split of the
series into "before" and "after" and takes the one where they differ most: the likelihood-ratio statistic for one change
in the mean (Hawkins, J. Am. Stat. Assoc. 72, 1977), in one direction. It finds a slow trend as well as a jump in the
first steps. The noise is taken from differences of neighbouring steps (von Neumann, Ann. Math. Stat. 12, 1941), so that
the rise itself does not count as noise.

People look at a run after each of its steps. So `has_risen` and `fall_of` ask for the more the longer the series is:
their boundaries are such that a run in which nothing changes crosses one at any of its steps at the rate `LOOKED_RATE`
or less. `chance_of_no_rise` is for one look, and what is large is read off series of pure noise of the same length.
`scripts/calibration.py` measures the rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from agentlightning.types.arrays import Float64Array, np

_SERIES = 2000
"""Series of noise that a statistic is compared with."""
_NEGLIGIBLE = 1e-9
_WINDOW = 4
"""Steps that make a level of the reward: their mean."""
LOOKED_RATE = 0.05
"""How often a run whose reward does not change is ever said to learn, and how often to have fallen, in 200 steps."""
FALSE_ALARMS = (
    f"(This is said of at most {LOOKED_RATE * 100:.0f} % of runs in which it is not so, however often one looks.)"
)
"""What a verdict at that rate says of itself."""
MISSED_RISES = (
    f"(This is said of at most {LOOKED_RATE * 100:.0f} % of runs that rise by 0.4, at one look after 60 steps.)"
)
"""What the verdict that a reward has not risen says of itself."""
_RISE_BOUNDARY, _FALL_BOUNDARY, _PER_LOG_STEP = 3.0, 3.2, 0.4
"""In standard deviations: what is asked at eight steps, and by how much more with each e-fold of their number."""
_LARGE_FALL = 0.2
"""A fall is large from this share of the range of rewards on …"""
_LARGE_VALIDATED_FALL = 0.1
"""… and one of validations, whose tasks are always the same, from this share on."""
_VALIDATED_BOUNDARY, _PER_LOG_VALIDATION, _FEWEST_VALIDATIONS = 3.0, 0.5, 3
"""The same as above for validations: what is asked at three, and how much more with each e-fold of their number."""
_DEVIATIONS = 2 * NormalDist().inv_cdf(0.975)
"""Standard deviations between the ends of a 95 % interval."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A reward that was higher before."""

    best: float
    """The mean of the best four steps in a row …"""
    since: int
    """… the last of which was so many steps ago,"""
    now: float
    """and the mean of the last four."""


@dataclass(frozen=True, slots=True)
class Validated:
    """A validation: its mean reward and the 95 % interval of that."""

    reward: float
    low: float
    high: float


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


def has_risen(rewards: Sequence[float]) -> bool:
    """Whether the reward has risen, said at `LOOKED_RATE` however often one looks. It needs eight steps."""
    series = np.asarray(rewards, dtype=np.float64)
    n = len(series)
    if n < 2 * _WINDOW or np.ptp(series) < _NEGLIGIBLE:
        return False
    sums = np.concatenate(([0.0], np.cumsum(series)))
    before = np.arange(_WINDOW, n - _WINDOW + 1)
    gains = (sums[n] - sums[before]) / (n - before) - sums[before] / before
    largest = float((gains / np.sqrt(1 / before + 1 / (n - before))).max())
    return largest >= _boundary(_RISE_BOUNDARY, n) * _careful_noise(series)


def fall_of(rewards: Sequence[float], spread: float) -> Fall | None:
    """Whether the reward has fallen from its best, by a large part of `spread`, the range of what rollouts earn.

    Said at `LOOKED_RATE` however often one looks. It needs eight steps. None of 200 recorded runs that learned is
    accused after any of its steps (`tests/algorithm/test_recorded_runs.py`).
    """
    series = np.asarray(rewards, dtype=np.float64)
    if len(series) < 2 * _WINDOW:
        return None
    levels = np.convolve(series, np.full(_WINDOW, 1 / _WINDOW), mode="valid")
    before = levels[:-_WINDOW]
    best, now = float(before.max()), float(levels[-1])
    if best - now <= _LARGE_FALL * spread or np.ptp(series) < _NEGLIGIBLE:
        return None
    variances = np.full(len(series), _careful_noise(series) ** 2)
    if _largest_fall(series.tolist(), variances.tolist(), _WINDOW) < _boundary(_FALL_BOUNDARY, len(series)):
        return None
    return Fall(best, len(levels) - 1 - int(before.argmax()), now)


def has_overfitted(rewards: Sequence[float], validated: Sequence[Validated], spread: float) -> bool:
    """Whether validation reward has fallen by a part of `spread` that is not small, while training reward has risen.

    Said at `LOOKED_RATE` however often one looks, of runs whose validation reward does not fall. It needs three
    validations.
    """
    values = [v.reward for v in validated]
    if len(values) < _FEWEST_VALIDATIONS or max(values) - values[-1] <= _LARGE_VALIDATED_FALL * spread:
        return False
    variances = [((v.high - v.low) / _DEVIATIONS) ** 2 for v in validated]
    asked = _VALIDATED_BOUNDARY + _PER_LOG_VALIDATION * float(np.log(len(values) / _FEWEST_VALIDATIONS))
    return _largest_fall(values, variances, shortest=1) >= asked and has_risen(rewards)


def _largest_fall(values: Sequence[float], variances: Sequence[float], shortest: int) -> float:
    """By how many standard deviations the last values lie below those right before them, over lengths of both."""
    n = len(values)
    sums, spreads = (np.concatenate(([0.0], np.cumsum(np.asarray(x, np.float64)))) for x in (values, variances))
    found = -np.inf
    for after in _lengths(shortest, n - shortest):
        start = n - after
        now = (sums[n] - sums[start]) / after
        for before in sorted({*_lengths(shortest, start), start}):
            level = (sums[start] - sums[start - before]) / before
            variance = (spreads[start] - spreads[start - before]) / before**2 + (spreads[n] - spreads[start]) / after**2
            found = max(found, (level - now) / max(variance, _NEGLIGIBLE**2) ** 0.5)
    return float(found)


def _lengths(shortest: int, longest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, … from the shortest to the longest."""
    powers = range(longest.bit_length())
    return sorted(n for n in {*(2**p for p in powers), *(3 * 2**p for p in powers)} if shortest <= n <= longest)


def _boundary(first: float, steps: int) -> float:
    return first + _PER_LOG_STEP * float(np.log(steps / (2 * _WINDOW)))


def _careful_noise(series: Float64Array) -> float:
    """`noise_of` as if there were one more difference, as large as the range: in a few steps noise may hide."""
    return float(np.sqrt((np.sum(np.diff(series) ** 2) + np.ptp(series) ** 2) / 2 / (len(series) - 1)))


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
