"""What is compared: the rollouts of a task, or the calls of one rollout with each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit, groups_that_differ
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Earned, Episode
from tests.algorithm.test_credit import episode

BY_CALL = CreditRule(by_call=True, advantage="drgrpo", keep_flat=True)


def game(rewards: list[Earned], final: float | None = None, name: str = "r", **given: Any) -> Episode:
    return replace(episode("g", [], name=name, **given), rewards=rewards, reward=final)


def found(*episodes: Episode) -> dict[str, float]:
    (batch,) = credit(list(episodes), BY_CALL)
    return {c.call.info.call_id: float(c.advantages[0]) for c in batch}


def test_calls_of_one_rollout_are_compared_by_the_rewards_that_name_them() -> None:
    rewards = [Earned(1.0, 0, named=True), Earned(4.0, 1, named=True), Earned(-2.0, 2, named=True), Earned(9.0, 2)]
    assert found(game(rewards, 9.0, tokens=(3, 2, 4))) == {"r-0": 0.0, "r-1": 3.0, "r-2": -3.0}


def test_a_call_without_a_reward_of_its_own_has_its_agents_or_the_rollouts() -> None:
    assert found(game([Earned(1.0, 0, named=True), Earned(3.0, 1)], 3.0)) == {"r-0": -1.0, "r-1": 1.0}
    agents = [Earned(15.0, 1, agent="wolf"), Earned(-10.0, 1, agent="seer")]
    assert found(game(agents, agents=("wolf", "seer"))) == {"r-0": 12.5, "r-1": -12.5}


def test_rollouts_do_not_change_each_others_calls() -> None:
    games = [game([Earned(win, 0, named=True), Earned(win + 2, 1, named=True)], name=f"r{win}") for win in (0.0, 100.0)]
    assert found(*games) == {"r0.0-0": -1.0, "r0.0-1": 1.0, "r100.0-0": -1.0, "r100.0-1": 1.0}
    assert groups_that_differ(games, BY_CALL) == {"g"}
    assert groups_that_differ([game([Earned(1.0, 1)], 1.0)], BY_CALL) == set(), "all its calls earned the same"


def test_groups_of_one_rollout_need_it() -> None:
    assert agl.GRPO(model="calc", group_size=1, group_by="rollout").group_size == 1
    with pytest.raises(agl.ConfigError, match="group_by='rollout'"):
        agl.GRPO(model="calc", group_size=1)
    with pytest.raises(agl.ConfigError, match="group_by='rollout' has no effect"):
        agl.GRPO(model="calc", group_by="rollout", credit="return_to_go")
