"""Verdicts that a run says of itself and the doctor says of it afterwards: one test, one text, one advice. Pure.

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

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

from agentlightning.types.arrays import Float64Array, np
from agentlightning.types.finding import Finding, problem, warning

WATCHED_STEPS = 30
"""Steps after which the reward should have risen."""
TREND_LEVEL = 0.15
"""A reward may have risen when one without any trend would look like it this rarely. Generous on purpose: a dead run
is found at one of the next looks, and a healthy one is not accused (`scripts/calibration.py` has the rates). That it
has not risen is said with it; that it has takes `trend.has_risen`."""
VISIBLE = 0.12
"""No verdict while a rise of this share of the range of rewards would go unseen in the noise of the steps."""
NEARLY_SOLVED = 0.9
"""A reward that has come this far from the lowest to the highest that a rollout earned gets no verdict."""
CLIPPED = 0.2
"""The share of clipped tokens from which on steps are too large."""

_GO_BACK = (
    "Go back to the best checkpoint, and on from there with a third of the learning_rate, schedule='linear', or "
    "kl_coef=0.01."
)


# ---- the reward of a run ---------------------------------------------------------------------------------------------


def fallen(rewards: Sequence[float], lowest: float, highest: float) -> Finding | None:
    """Whether a run's reward has fallen from where it was. `rewards` is the mean of each step, from the first on;
    `lowest` and `highest` are what single rollouts earned.
    """
    fall = fall_of(rewards, max(0.0, highest - lowest))
    if fall is None:
        return None
    return problem(
        "reward_fell",
        f"The reward was {fall.best:.3g} {fall.since} steps ago and has fallen to {fall.now:.3g}. {FALSE_ALARMS}",
        _GO_BACK,
        best=fall.best,
        steps_ago=fall.since,
        now=fall.now,
    )


def not_risen(rewards: Sequence[float], lowest: float, highest: float, metrics: Mapping[str, Any]) -> Finding | None:
    """Whether a run's reward has not risen, with the likeliest cause by the `metrics` of its last step; the rest as in
    `fallen`. None also where it is high already, or its steps are too noisy to tell.
    """
    spread = max(0.0, highest - lowest)
    if not may_stand_still(rewards) or _is_high(rewards, lowest, spread) or _is_too_noisy(rewards, spread):
        return None
    third = len(rewards) // 3
    first, last, noise = statistics.mean(rewards[:third]), statistics.mean(rewards[-third:]), noise_of(rewards)
    return warning(
        "not_rising",
        f"The reward has not risen in {len(rewards)} steps: it was {first:.3g} in the first third of them and "
        f"{last:.3g} in the last, and varies by ±{noise:.2g} from step to step. {MISSED_RISES}",
        _likely_cause(metrics),
        first_third=first,
        last_third=last,
        noise=noise,
    )


def may_stand_still(rewards: Sequence[float]) -> bool:
    """Whether a run has had its time, and a test for one look sees no rise."""
    return len(rewards) >= WATCHED_STEPS and chance_of_no_rise(rewards) > TREND_LEVEL


def _is_high(rewards: Sequence[float], lowest: float, spread: float) -> bool:
    return spread > 0 and statistics.mean(rewards[-(len(rewards) // 3) :]) >= lowest + NEARLY_SOLVED * spread


def _is_too_noisy(rewards: Sequence[float], spread: float) -> bool:
    return spread > 0 and visible_rise(rewards, 0.05) > VISIBLE * spread


def _likely_cause(metrics: Mapping[str, Any]) -> str:
    if metrics.get("learning_rate") == 0:
        return "The learning rate is 0, so nothing is learned: leave learning_rate out to take the model's default."
    if metrics.get("updates") == 0:
        return "Most groups have equal rewards: try a larger group_size, other tasks, or partial rewards."
    if (metrics.get("clip_fraction") or 0.0) > CLIPPED:
        return "Many tokens are clipped, so steps are too large: try a lower learning_rate."
    if (entropy := metrics.get("entropy")) is not None and entropy < 0.02:
        return "The model says the same every time (entropy near 0): try a higher temperature or an entropy_coef."
    return (
        "Read a few rollouts (agl show): does the reward tell good answers from bad ones? If it does, try three times "
        "the learning_rate, or more rollouts per step (tasks_per_step, group_size)."
    )


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
    boundary = _VALIDATED_BOUNDARY + _PER_LOG_VALIDATION * float(np.log(len(values) / _FEWEST_VALIDATIONS))
    return _largest_fall(values, variances, shortest=1) >= boundary and has_risen(rewards)


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
