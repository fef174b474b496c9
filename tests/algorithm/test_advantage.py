"""Advantages and weights: hand-derived numbers and the properties that must hold for all inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agentlightning as agl
from agentlightning.algorithm.credit.advantage import ADVANTAGES, Estimator, drgrpo, gae, grpo, pass_at, return_to_go
from agentlightning.algorithm.credit.ratios import correction_weights, entry_weights, overlong_penalty
from agentlightning.algorithm.update import Updater
from agentlightning.algorithm.whatif import telling_variants
from agentlightning.errors import ConfigError
from agentlightning.metrics import Reporter

from .fakes import CountingLearner
from .test_credit import episode

rewards = st.floats(-10, 10, allow_nan=False, width=32)


def group(returns: list[float], counts: list[bool] | None = None, estimator: Estimator = grpo) -> np.ndarray:
    n = len(returns)
    counted = np.ones(n, bool) if counts is None else np.array(counts)
    return estimator(np.array(returns, np.float32), np.zeros(n, np.int32), counted)


def test_hand_derived() -> None:
    assert group([1, 0, 0, 0]) == pytest.approx([3**0.5, -(3**-0.5), -(3**-0.5), -(3**-0.5)], rel=1e-6)
    assert group([1, 0, 0, 0], estimator=drgrpo) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_groups_do_not_see_each_other() -> None:
    returns = np.array([1, 0, 5, 7], np.float32)
    both = grpo(returns, np.array([0, 0, 1, 1], np.int32), np.ones(4, bool))
    assert both == pytest.approx([1, -1, -1, 1])


@given(st.lists(st.tuples(rewards, st.booleans()), min_size=2, max_size=8), rewards)
def test_a_masked_rollout_never_moves_its_siblings(members: list[tuple[float, bool]], other: float) -> None:
    counts = [counted for _, counted in members]
    as_given = group([r for r, _ in members], counts)
    replaced = group([r if counted else other for r, counted in members], counts)
    assert np.array_equal(as_given, replaced)
    assert all(a == 0 for a, counted in zip(as_given, counts, strict=True) if not counted)


@given(st.lists(rewards, min_size=2, max_size=8))
def test_advantages_of_a_group_add_up_to_nothing(returns: list[float]) -> None:
    assert abs(float(group(returns).sum())) < 1e-3


@given(rewards, st.integers(2, 6))
def test_equal_returns_teach_nothing(value: float, n: int) -> None:
    assert not group([value] * n).any()


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans()), min_size=1, max_size=8),
    st.sampled_from(["token", "rollout"]),
)
def test_weights_of_all_tokens_add_up_to_one(members: list[tuple[int, bool]], normalization: str) -> None:
    tokens = np.array([n for n, _ in members], np.int32)
    counts = np.array([c for _, c in members])
    total = float((entry_weights(tokens, counts, normalization) * tokens).sum())
    assert total == pytest.approx(1.0 if (counts & (tokens > 0)).any() else 0.0, abs=1e-5)


def test_normalizations_differ_as_named() -> None:
    tokens, counts = np.array([1, 3], np.int32), np.ones(2, bool)
    assert entry_weights(tokens, counts, "token") == pytest.approx([0.25, 0.25])
    assert entry_weights(tokens, counts, "rollout") == pytest.approx([0.5, 1 / 6])
    with pytest.raises(ValueError, match="'token', 'rollout'"):
        entry_weights(tokens, counts, "sentence")


def test_estimators_by_hand() -> None:
    returns = [3.0, 1.0, 2.0]
    assert group(returns, estimator=ADVANTAGES["rloo"]) == pytest.approx([1.5, -1.5, 0.0])
    assert group(returns, estimator=ADVANTAGES["reinforce"]) == pytest.approx(returns)
    assert group(returns, estimator=ADVANTAGES["best"]).tolist() == [1, 0, 0]
    assert group(returns, estimator=ADVANTAGES["best_and_worst"]).tolist() == [1, -1, 0]
    two = np.array([4, 0, 1, 1], np.float32), np.array([0, 0, 1, 1], np.int32), np.ones(4, bool)
    assert ADVANTAGES["reinforce++"](*two) == pytest.approx([4, 0, 1, 1]), "whitened later, over tokens"
    assert ADVANTAGES["reinforce++baseline"](*two) == pytest.approx([2, -2, 0, 0])
    assert group([1, 0, 0, 0], estimator=ADVANTAGES["maxrl"]) == pytest.approx([3, -1, -1, -1])


def expected_gradient(estimator: Estimator, p: float, n: int) -> float:
    """Of (1 / n) Σ A ∂ log π / ∂p over all outcomes of n rollouts that each earn 1 with probability p, else 0."""
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=n):
        chance = math.prod(p if r else 1 - p for r in outcome)
        slopes = [1 / p if r else -1 / (1 - p) for r in outcome]
        total += chance * float(np.mean(group(list(outcome), estimator=estimator) * slopes))
    return total


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_gradient_of_maxrl_is_that_of_its_objective(p: float) -> None:
    """∂/∂p Σ pass@k / k for k < n, where pass@k = 1 − (1 − p)^k."""
    n = 5
    expected = sum((1 - p) ** (k - 1) for k in range(1, n))
    assert expected_gradient(ADVANTAGES["maxrl"], p, n) == pytest.approx(expected, rel=1e-5)


async def test_maxrl_is_not_for_rewards_below_zero() -> None:
    """Its division by the mean would make an advantage of a million of rewards that are −1 and 1."""
    updater = Updater(agl.GRPO(model="calc", advantage="maxrl"), cast(Any, CountingLearner()), Reporter())
    episodes = [episode("g", [(r, 0)], tokens=(1,), name=f"{r}") for r in (-1.0, 1.0)]
    with pytest.raises(ConfigError, match=r"rewards of at least 0.*earned -1"):
        await updater.prepare(episodes)
    assert "advantage=maxrl" not in telling_variants(agl.GRPO(model="calc"), episodes)
    assert "advantage=maxrl" in telling_variants(agl.GRPO(model="calc"), episodes[1:])


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_gradient_of_pass_at_k_is_that_of_pass_at_k(p: float, k: int) -> None:
    assert expected_gradient(pass_at(k), p, 5) == pytest.approx(k * (1 - p) ** (k - 1), rel=1e-5, abs=1e-6)


@given(st.lists(st.integers(0, 4).map(float), min_size=3, max_size=6), st.integers(2, 3))
def test_pass_at_k_is_what_a_rollout_adds_to_the_best(returns: list[float], k: int) -> None:
    n = len(returns)
    expected = [
        sum(
            max(returns[j] for j in chosen) - max(returns[j] for j in chosen if j != i)
            for chosen in itertools.combinations(range(n), k)
            if i in chosen
        )
        * n
        / math.comb(n, k)
        for i in range(n)
    ]
    flat = len(set(returns)) == 1
    assert group(returns, estimator=pass_at(k)) == pytest.approx([0.0] * n if flat else expected, abs=1e-4)


@given(
    st.lists(st.tuples(rewards, st.booleans()), min_size=2, max_size=8), rewards, st.sampled_from(sorted(ADVANTAGES))
)
def test_a_masked_rollout_moves_nobody_in_any_estimator(
    members: list[tuple[float, bool]], other: float, name: str
) -> None:
    counts = [counted for _, counted in members]
    as_given = group([r for r, _ in members], counts, ADVANTAGES[name])
    replaced = group([r if counted else other for r, counted in members], counts, ADVANTAGES[name])
    assert np.array_equal(as_given, replaced)


def test_gae_by_hand() -> None:
    advantages, returns = gae([0.0, 1.0], [0.4, 0.6], gamma=0.9, lam=0.5)
    last = 1.0 - 0.6
    first = 0.9 * 0.6 - 0.4 + 0.9 * 0.5 * last
    assert advantages == pytest.approx([first, last])
    assert returns == pytest.approx([first + 0.4, 1.0])


@given(st.lists(rewards, min_size=1, max_size=6), st.floats(0, 1))
def test_gae_with_lambda_1_and_no_critic_is_the_return_to_go(given_rewards: list[float], gamma: float) -> None:
    advantages, _ = gae(given_rewards, [0.0] * len(given_rewards), gamma, 1.0)
    assert advantages == pytest.approx(return_to_go(given_rewards, gamma), abs=1e-4)


def test_the_overlong_penalty_is_whole_at_the_limit() -> None:
    tokens = np.array([0, 5, 6, 8, 10, 12], np.int32)
    assert overlong_penalty(tokens, 10, 5).tolist() == pytest.approx([0, 0, -0.2, -0.6, -1, -1])
    assert overlong_penalty(tokens, 10, 0).tolist() == [0, 0, 0, 0, -1, -1]


def test_corrections() -> None:
    old = np.log(np.array([2.0, 0.5, 3.0, 1.0], np.float32))
    sampled, sequences = np.zeros(4, np.float32), np.array([0, 0, 1, 1], np.int32)

    def weights(kind: str) -> list[float]:
        return correction_weights(old, sampled, sequences, kind, cap=2.5, floor=0.6).tolist()

    assert weights("token") == pytest.approx([2.0, 0.5, 2.5, 1.0])
    assert weights("mask") == pytest.approx([2.0, 0.0, 0.0, 1.0])
    assert weights("sequence") == pytest.approx([1.0, 1.0, 2.5, 2.5])
    assert weights("sequence_mask") == pytest.approx([1.0, 1.0, 0.0, 0.0])
    assert correction_weights(sampled, sampled, sequences, "mask", 2.0, 0.5).tolist() == [1.0] * 4
    vetoed = correction_weights(old, sampled, sequences, "token", cap=2.5, veto=0.7)
    assert vetoed.tolist() == pytest.approx([0.0, 0.0, 2.5, 1.0]), "its second token could not have come from here"
    with pytest.raises(ValueError, match="no correction 'magic'"):
        weights("magic")


def test_a_sum_over_the_sequence_is_the_gradient_of_rloo() -> None:
    """1/R Σ_r A_r Σ_t log π (arXiv 2402.14740, eq. 8): a token's weight is 1 / rollouts, however long they are."""
    tokens, counts = np.array([2, 30, 5], np.int32), np.array([True, True, False])
    assert entry_weights(tokens, counts, "sum").tolist() == [0.5, 0.5, 0.0]
