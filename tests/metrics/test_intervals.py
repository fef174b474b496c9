"""Intervals and what so many tasks can show: coverage from the binomial distribution itself, not from samples."""

from __future__ import annotations

import math
from random import Random

import pytest

from agentlightning.algorithm.prompts.significance import evidence, least_gain
from agentlightning.metrics.intervals import (
    _share_below,
    bounds_of,
    is_positive,
    mean_interval,
    paired_difference,
    power_words,
    visible_gain,
    widened,
)


def coverage(tasks: int, p: float) -> float:
    """The chance that the interval of so many rewards of 0 and 1 holds their mean."""
    total = 0.0
    for won in range(tasks + 1):
        low, high = mean_interval([1.0] * won + [0.0] * (tasks - won))
        if low - 1e-9 <= p <= high + 1e-9:
            total += math.comb(tasks, won) * p**won * (1 - p) ** (tasks - won)
    return total


@pytest.mark.quick_with("5-", "20-")
@pytest.mark.parametrize("p", [0.5, 0.9, 0.97, 1.0])
@pytest.mark.parametrize("tasks", [5, 10, 20, 50, 100, 200])
def test_intervals_of_rewards_of_0_and_1_hold_at_least_as_often_as_they_say(tasks: int, p: float) -> None:
    assert coverage(tasks, p) >= 0.95 - 1e-3


def test_with_many_tasks_they_are_no_wider_than_needed() -> None:
    low, high = mean_interval([1.0] * 500 + [0.0] * 500)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / 1000**0.5, rel=0.05)


@pytest.mark.parametrize(("won", "tasks"), [(20, 20), (0, 20), (3, 3)])
def test_all_alike_is_clopper_and_pearsons(won: int, tasks: int) -> None:
    low, high = mean_interval([1.0] * won + [0.0] * (tasks - won))
    edge = 0.025 ** (1 / tasks)
    assert (low, high) == pytest.approx((edge, 1.0) if won else (0.0, 1 - edge), abs=5e-3)


def test_the_approximation_is_that_of_drawn_weights() -> None:
    random = Random(0)
    points = {0.0: 2, 0.2: 3, 0.7: 4, 1.0: 5}
    flat = [x for x, n in points.items() for _ in range(n)]
    means = []
    for _ in range(20000):
        weights = [random.expovariate(1) for _ in flat]
        means.append(sum(w * x for w, x in zip(weights, flat, strict=True)) / sum(weights))
    for threshold in (0.4, 0.5, 0.63, 0.8):
        drawn = sum(mean <= threshold for mean in means) / len(means)
        assert _share_below(points, threshold) == pytest.approx(drawn, abs=0.011)


def test_many_different_values_are_as_a_normal_mean() -> None:
    random = Random(0)
    values = [random.random() for _ in range(3000)]
    low, high = mean_interval(values)
    assert high - low == pytest.approx(2 * 1.96 * (1 / 12 / 3000) ** 0.5, rel=0.2)
    assert low < sum(values) / 3000 < high


def test_bounds_are_those_there_can_be() -> None:
    assert bounds_of([0.0, 1.0]) == (0.0, 1.0)
    assert bounds_of([-1.0, 0.5]) == (-1.0, 1.0)
    assert bounds_of([2.0, 2.0]) == (0.0, 2.0)
    low, high = mean_interval([1.0] * 5, bounds=(-1.0, 1.0))
    assert low == pytest.approx(2 * 0.025**0.2 - 1, abs=0.02)
    assert high == 1.0


def test_differences_that_are_all_nothing_may_still_be_something() -> None:
    gain, (low, high) = paired_difference([1.0] * 20, [1.0] * 20)
    assert (gain, low) == (0.0, pytest.approx(-high))
    assert 0.1 < high < 0.3
    assert is_positive([1.0] * 12 + [0.0] * 8)
    assert not is_positive([1.0] * 3 + [0.0] * 17)


def test_the_best_of_many_has_a_wider_interval() -> None:
    assert widened(0.5, (0.3, 0.7), 1) == pytest.approx((0.3, 0.7))
    low, high = widened(0.5, (0.3, 0.7), 7)
    assert low < 0.3 < 0.7 < high
    assert widened(0.95, (0.8, 0.99), 50)[1] <= 1.0


def test_a_gain_that_is_sure_is_below_the_one_that_was_seen() -> None:
    differences = [1.0] * 30 + [0.0] * 20
    least = least_gain(differences, 20.0)
    assert 0.2 < least < 0.6
    assert evidence([(d - least) / (1 + least) for d in differences]) == pytest.approx(20.0, rel=1e-3)
    assert least_gain([], 20.0) == pytest.approx(-1.0)


def test_more_tasks_show_smaller_differences_and_few_show_none() -> None:
    shown = [visible_gain(n, is_positive) for n in (20, 100, 900)]
    assert shown == sorted((s or 9.0 for s in shown), reverse=True)
    assert (visible_gain(20, is_positive, repeats=8) or 9.0) < (shown[0] or 0.0)
    assert visible_gain(3, is_positive) is None
    assert "too few" in power_words(3, is_positive)
    assert f"+{shown[0]:.2f}" in power_words(20, is_positive)
