"""What is measured of a judge: planted biases are found, κ is that of the hand, and intervals hold at their rate."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from agentlightning.algorithm.prompts.comparison import Answers, Scored
from agentlightning.doctor.judge import LEVEL, Estimate, JudgedGroup, measure


def group(score: Callable[[int, float], float], labels: Sequence[float | None], seed: int = 0) -> JudgedGroup:
    """`score`: of a rollout's number and the place where it is shown, 0 for the first and 1 for the last."""
    order = list(range(len(labels)))
    random.Random(seed).shuffle(order)
    last = max(1, len(order) - 1)
    asked = [[Scored(score(n, shown.index(n) / last), "") for n in range(len(order))] for shown in (order, order[::-1])]
    return JudgedGroup(Answers(order, asked[0], asked[1]), labels)


def estimate(found: Any) -> Estimate:
    assert isinstance(found, Estimate)
    assert found.low <= found.value <= found.high
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("bias", [1.0, 0.3, 0.0, -0.2])
def test_a_planted_order_bias_is_found_whatever_is_shown(size: int, bias: float) -> None:
    worth = [0.3 + 0.4 * n / size for n in range(size)]
    score = lambda n, place: bias * (1 - place) + (1 - abs(bias)) * worth[n]  # noqa: E731
    found = measure([group(score, [None] * size, seed) for seed in range(9)])
    assert estimate(found.order_bias).value == pytest.approx(bias)
    assert (found.agreement, found.kappa) == (None, None)
    if bias == 1.0:
        assert estimate(found.self_agreement).value == -1.0


def test_kappa_is_that_of_the_hand() -> None:
    """Of six pairs the judge says 4 better or worse and 2 equal, the labels 4 and 2, and 4 are the same:
    p_o = 4/6, p_e = (1/3)(1/3) + (2/3)(2/3)/2 = 1/3, κ = 1/2. Of the four pairs with different labels it orders 3, and
    gives one a tie: 7/8."""
    said = [[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.5, 0.5], [0.6, 0.4], [0.4, 0.4]]
    labels = [[1.0, 0.0], [0.0, 5.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    pairs = zip(said, labels, strict=True)
    found = measure([group(lambda n, _, s=scores: s[n], given) for scores, given in pairs])
    assert (estimate(found.kappa).value, estimate(found.kappa).pairs) == (pytest.approx(0.5), 6)
    assert (estimate(found.agreement).value, estimate(found.agreement).pairs) == (pytest.approx(7 / 8), 4)
    assert estimate(found.agreement).groups == 4
    assert estimate(found.order_bias).value == 0.0


def test_kappa_is_cohens_over_both_ways_to_write_each_pair() -> None:
    rng = np.random.default_rng(1)
    said, labels = rng.integers(0, 3, (40, 2)) / 2, rng.integers(0, 3, (40, 2)).astype(float)
    found = measure([group(lambda n, _, s=s: float(s[n]), list(given)) for s, given in zip(said, labels, strict=True)])
    table = np.zeros((3, 3))
    for s, given in zip(said, labels, strict=True):
        for a, b in ((0, 1), (1, 0)):
            table[int(np.sign(s[a] - s[b])) + 1, int(np.sign(given[a] - given[b])) + 1] += 1 / 80
    chance = float(table.sum(0) @ table.sum(1))
    assert estimate(found.kappa).value == pytest.approx((np.trace(table) - chance) / (1 - chance))


def test_scores_that_hardly_differ_count_as_equal_where_they_should() -> None:
    judged = [group(lambda n, _: 0.5 + 0.04 * n, [0.0, 0.0]), group(lambda n, _: 0.9 * n, [0.0, 1.0])]
    assert estimate(measure(judged, equal=0.05).kappa).value == 1.0
    assert estimate(measure(judged).kappa).value < 0.5


def test_what_has_no_label_is_in_no_pair_and_masked_groups_in_no_agreement() -> None:
    fair = group(lambda n, _: n / 3, [0.0, None, 1.0, None])
    first = group(lambda n, place: 1 - place, [0.0, 1.0, 0.0, 1.0])
    found = measure([fair, first], min_agreement=0.5)
    assert (found.groups, found.masked) == (2, 1)
    assert (estimate(found.agreement).pairs, estimate(found.agreement).value) == (1, 1.0)
    assert estimate(found.self_agreement).value == 0.0
    assert measure([fair], min_agreement=0.5).masked == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "size", "noise", "runs"),
    [
        (12, 6, 0.4, 40),
        *(
            pytest.param(*sizes, noise, 150, marks=pytest.mark.slow)
            for sizes in ((8, 2), (25, 4), (60, 6))
            for noise in (0.05, 0.4, 1.0)
        ),
    ],
)
def test_the_intervals_hold_at_their_rate(groups: int, size: int, noise: float, runs: int) -> None:
    """A judge with noise of its own, a noise for each question, a bias, and a luck that all pairs of a group share."""
    rng = np.random.default_rng(int(1000 * noise) + groups)

    def drawn() -> JudgedGroup:
        labels = rng.integers(0, 2, size).astype(float)
        own = 0.5 + 0.3 * (labels - 0.5) * rng.choice([1.0, -0.3]) + noise * rng.normal(0, 0.3, size)
        each = iter(noise * rng.normal(0, 0.1, 2 * size))
        told = lambda n, place: float(np.clip(np.round(own[n] + next(each) - 0.1 * place, 1), 0, 1))  # noqa: E731
        return group(told, list(labels), int(rng.integers(10**9)))

    names = ("agreement", "kappa", "order_bias", "self_agreement")
    truth = measure([drawn() for _ in range(40 * runs)], equal=0.05)
    held = dict.fromkeys(names, 0)
    for _ in range(runs):
        found = measure([drawn() for _ in range(groups)], equal=0.05)
        for name in names:
            one = getattr(found, name)
            held[name] += one is None or one.low <= getattr(truth, name).value <= one.high
    assert {name: n for name, n in held.items() if n < (LEVEL - 0.035) * runs} == {}
