"""Rewards of several data sets on one scale: each divided by the deviation of its own, which is kept in checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.parts.scales import RewardScales
from agentlightning.algorithm.update import Updater
from agentlightning.errors import ConfigError
from agentlightning.metrics import Reporter
from agentlightning.types import Outcome

from .fakes import CountingLearner
from .test_credit import episode


def of(source: str, rewards: list[float], outcome: Outcome = Outcome.OK) -> list[Episode]:
    found = [
        episode(source, [(r, 0)], tokens=(1,), name=f"{source}{n}", outcome=outcome) for n, r in enumerate(rewards)
    ]
    metadata = {"group": source, "source": source}
    return [replace(e, rollout=e.rollout.model_copy(update={"metadata": metadata})) for e in found]


def test_rewards_are_divided_by_the_moving_deviation_of_their_data_set() -> None:
    rng, scales = np.random.default_rng(0), RewardScales()
    mean, square = np.zeros(2), np.zeros(2)
    for step in range(20):
        steps = [rng.normal(3.0, 0.5, 8), rng.normal(-40.0, 100.0, 8)]
        found = scales.scaled([*of("small", steps[0].tolist()), *of("large", steps[1].tolist())])
        now = np.array([s.mean() for s in steps]), np.array([(s * s).mean() for s in steps])
        kept = 0.9 if step else 0.0
        mean, square = kept * mean + (1 - kept) * now[0], kept * square + (1 - kept) * now[1]
        expected = np.concatenate([s / d for s, d in zip(steps, np.sqrt(square - mean**2), strict=True)])
        assert [e.reward for e in found] == pytest.approx(expected.tolist())
        assert [e.rewards[0].value for e in found] == pytest.approx(expected.tolist())


def test_what_never_differs_stays_as_it_is_and_failures_say_nothing() -> None:
    scales = RewardScales()
    assert [e.reward for e in scales.scaled(of("flat", [0.7, 0.7]))] == [0.7, 0.7]
    scales.scaled([*of("a", [0.0, 2.0]), *of("a", [1e6], Outcome.AGENT_ERROR)])
    assert scales.deviation("a") == pytest.approx(1.0)


def test_what_is_replayed_is_scaled_and_says_nothing_new() -> None:
    alone, beside = RewardScales(), RewardScales()
    fresh = of("a", [0.0, 2.0])
    alone.scaled(fresh)
    found = beside.scaled([*fresh, *(replace(e, replayed=True) for e in of("a", [0.0, 50.0]))])
    assert beside.values == alone.values
    assert [e.reward for e in found] == [0.0, 2.0, 0.0, 50.0], "all divided by the deviation of the fresh ones, 1"


async def test_both_data_sets_teach_alike_and_a_resumed_run_goes_on() -> None:
    async def largest(scale: str, state: dict[str, Any] | None = None) -> tuple[Updater, Any]:
        learner: Any = CountingLearner()
        settings = agl.GRPO(model="calc", advantage="drgrpo", reward_scale=scale)  # pyright: ignore[reportArgumentType]
        updater = Updater(settings, learner, Reporter())
        await updater.parts.load(state or {})
        return updater, learner

    episodes = [*of("cents", [0.0, 100.0]), *of("euros", [0.0, 1.0])]
    updater, learner = await largest("source")
    await updater.learn(episodes, 0.1)
    assert np.abs(learner.batches[0].advantages_E).tolist() == pytest.approx([1.0] * 4)
    resumed, _ = await largest("source", updater.parts.state())
    assert resumed.parts.state() == updater.parts.state()
    plain, learner = await largest("none")
    await plain.learn(episodes, 0.1)
    assert sorted(np.abs(learner.batches[0].advantages_E).tolist()) == pytest.approx([0.5, 0.5, 50.0, 50.0])


@pytest.mark.parametrize("advantage", ["grpo", "maxrl"])
def test_advantages_that_have_no_scale_refuse_it(advantage: str) -> None:
    with pytest.raises(ConfigError, match="has no effect here"):
        agl.GRPO(model="calc", advantage=advantage, reward_scale="source")
