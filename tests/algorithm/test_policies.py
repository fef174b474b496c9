"""Several policies see the same rollouts: each its own calls and rewards, and nothing of what others did or earned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit, seen_by
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Earned, Episode
from agentlightning.algorithm.parts.preflight import FLAT_STEPS, Preflight
from agentlightning.algorithm.update import PolicyUpdaters, Updater
from agentlightning.errors import ConfigError
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole

from .fakes import CountingLearner
from .test_credit import episode

RULE = CreditRule(advantage="drgrpo")


def game(name: str, rewards: dict[str | None, float], *, policies: str = "ab", agents: Any = None) -> Episode:
    """A rollout with one call of two tokens per letter of `policies`, and rewards at its end by agent."""
    one = episode("g", [], tokens=(2,) * len(policies), agents=agents, name=name)
    calls = [replace(c, info=replace(c.info, policy=p)) for c, p in zip(one.calls, policies, strict=True)]
    earned = [Earned(value, len(calls) - 1, agent) for agent, value in rewards.items()]
    own = [e.value for e in earned if e.agent is None] or [float(np.mean([e.value for e in earned]))]
    return replace(one, calls=calls, rewards=earned, reward=own[-1])


def advantages(policy: str, episodes: list[Episode]) -> dict[str, float]:
    """By call id, of the calls that the policy trains."""
    batches = credit([seen_by(policy, e) for e in episodes], replace(RULE, keep_flat=True))
    return {c.call.info.call_id: float(c.advantages[0]) for batch in batches for c in batch}


def test_each_policy_learns_its_own_calls_from_its_own_reward() -> None:
    """A zero-sum game: what is good for one is bad for the other."""
    episodes = [game("x", {"a": 1.0, "b": -1.0}), game("y", {"a": -1.0, "b": 1.0})]
    assert advantages("a", episodes) == {"x-0": 1.0, "y-0": -1.0}
    assert advantages("b", episodes) == {"x-1": -1.0, "y-1": 1.0}
    assert [seen_by(p, episodes[0]).reward for p in "ab"] == [1.0, -1.0]


def test_a_reward_that_names_nobody_is_for_all_of_them() -> None:
    episodes = [game("x", {None: 1.0}), game("y", {None: 0.0})]
    assert advantages("a", episodes) == {"x-0": 0.5, "y-0": -0.5}
    assert advantages("b", episodes) == {"x-1": 0.5, "y-1": -0.5}


def test_a_reward_may_name_the_policy_or_its_agent() -> None:
    for named in ("a", "alice"):
        episodes = [game(n, {named: r}, agents=("alice", "bob")) for n, r in (("x", 1.0), ("y", 0.0))]
        assert advantages("a", episodes) == {"x-0": 0.5, "y-0": -0.5}
        assert advantages("b", episodes) == {}, "nobody said what it earned"


class Told(SilentConsole):
    """Remembers warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


@pytest.fixture
def console() -> Told:
    return Told()


@pytest.fixture
def reporter(tmp_path: Path, console: Told) -> Iterator[Reporter]:
    reporter = Reporter(JsonlSink(tmp_path / "metrics.jsonl"), console)
    yield reporter
    reporter.close()


async def test_a_rollout_without_the_policy_is_no_sibling_of_it(reporter: Reporter, console: Told) -> None:
    settings = agl.GRPO(model="calc", policies=["a", "b", "c"], advantage="drgrpo")
    learners: dict[str, Any] = {name: CountingLearner() for name in "abc"}
    updaters = {name: Updater(settings, learner, reporter) for name, learner in learners.items()}
    both = PolicyUpdaters(updaters, reporter)
    episodes = [game("x", {None: 1.0}), game("y", {None: 0.0}), game("z", {None: 0.0}, policies="a")]
    await both.learn(episodes, 1e-3)
    metrics = await both.learn(episodes, 1e-3)
    assert sorted(learners["a"].batches[0].advantages_E.tolist()) == pytest.approx([-1 / 3] * 4 + [2 / 3] * 2)
    assert sorted(learners["b"].batches[0].advantages_E.tolist()) == pytest.approx([-0.5] * 2 + [0.5] * 2)
    assert (metrics["a/rollouts"], metrics["b/rollouts"], metrics["c/rollouts"]) == (3, 2, 0)
    assert (metrics["a/version"], metrics["b/version"], metrics["c/updates"]) == (2, 2, 0)
    assert metrics["b/reward"] == 0.5
    assert console.warnings == [w for w in console.warnings if "'c'" in w and "model='c'" in w]
    assert len(console.warnings) == 1


async def test_measures_of_a_policy_are_of_fresh_rollouts(reporter: Reporter) -> None:
    settings = agl.GRPO(model="calc", policies=["a", "b"], replay=1)
    learner: Any = CountingLearner()
    both = PolicyUpdaters({"a": Updater(settings, learner, reporter)}, reporter)
    fresh = [game("x", {None: 1.0}), game("y", {None: 0.0})]
    again = [replace(e, replayed=True) for e in (game("v", {None: 1.0}), game("w", {None: 1.0}))]
    metrics = await both.learn([*fresh, *again], 1e-3)
    assert (metrics["a/reward"], metrics["a/rollouts"], metrics["a/tokens"]) == (0.5, 2, 4)


def test_a_zero_sum_game_is_not_taken_for_one_without_differences(reporter: Reporter) -> None:
    preflight = Preflight(reporter, RULE, policies=("a", "b"))
    for _ in range(2 * FLAT_STEPS):
        preflight.check([game("x", {"a": 1.0, "b": -1.0}), game("y", {"a": -1.0, "b": 1.0})])
    assert not preflight.solved


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"policies": "solver"}, "list of different names"),
        ({"policies": ["a", "a"]}, "list of different names"),
        ({"policies": ["a", "b"], "frozen": "a"}, "list of different names"),
        ({"policies": ["a/b"]}, "cannot be called"),
        ({"frozen": "base"}, "give policies"),
    ],
)
def test_aliases_that_cannot_be_are_refused(settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.GRPO(model="calc", **settings)


def test_chats_are_for_one_policy() -> None:
    with pytest.raises(ConfigError, match="one by one"):
        agl.SFT(model="calc", source="chats", policies=["a", "b"])
