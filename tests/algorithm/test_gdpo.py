"""GDPO: its numbers against the paper's formula, which groups are flat, what a rollout without a part is worth."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit, groups_that_differ, groups_to_learn_from
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Earned, Episode, Sampled
from agentlightning.algorithm.measures import of_rollouts
from agentlightning.algorithm.parts.replay import ReplayBuffer
from agentlightning.doctor.evidence import Evidence
from agentlightning.errors import ConfigError
from agentlightning.types import Outcome

from .test_credit import advantages, episode
from .test_loop import Recorded, run
from .test_watched import Listening

WEIGHTS = {"right": 1.0, "brief": 0.5}
RULE = CreditRule(advantage="gdpo", weights=WEIGHTS)


def graded(group: str, name: str = "r", *, agent: str | None = None, **given: Any) -> Episode:
    """A rollout of one call that earned these parts; the others are settings of `episode`."""
    parts = {k: float(v) for k, v in given.items() if k in ("right", "brief", "other")}
    how = {"tokens": (1,), **{k: v for k, v in given.items() if k not in parts}}
    value = sum(WEIGHTS.get(k, 0.0) * v for k, v in parts.items())
    return replace(episode(group, [(value, 0)], name=name, **how), rewards=[Earned(value, 0, agent, False, parts)])


def by_the_paper(parts: np.ndarray, groups: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """parts: [rollouts, parts]. Normalised by group and part, added up, normalised over the batch."""
    total = np.zeros(len(parts))
    for k, weight in enumerate(weights):
        for group in set(groups.tolist()):
            own = groups == group
            spread = parts[own, k].std()
            if own.sum() > 1 and spread > 1e-6:
                total[own] += weight * (parts[own, k] - parts[own, k].mean()) / spread
    return (total - total.mean()) / total.std() if total.std() > 1e-6 else total * 0


halves = st.integers(-4, 4).map(lambda n: n / 2)
rollouts = st.lists(st.tuples(st.sampled_from("ghi"), halves, halves), min_size=1, max_size=10)


@given(rollouts)
def test_the_numbers_are_the_papers(given_rollouts: list[tuple[str, float, float]]) -> None:
    found = advantages([graded(g, right=a, brief=b) for g, a, b in given_rollouts], RULE)
    groups = np.array([g for g, _, _ in given_rollouts])
    parts = np.array([[a, b] for _, a, b in given_rollouts])
    expected = by_the_paper(parts, groups, np.array([1.0, 0.5]))
    assert [a for (a,) in found] == pytest.approx(expected.tolist(), abs=1e-5)


@given(rollouts)
def test_a_group_is_flat_only_if_all_its_parts_are(given_rollouts: list[tuple[str, float, float]]) -> None:
    episodes = [graded(g, f"r{i}", right=a, brief=b) for i, (g, a, b) in enumerate(given_rollouts)]
    of_group: dict[str, set[tuple[float, float]]] = {}
    for g, a, b in given_rollouts:
        of_group.setdefault(g, set()).add((a, b))
    differing = {g for g, values in of_group.items() if len(values) > 1}
    assert groups_that_differ(episodes, RULE) == differing
    assert groups_to_learn_from(episodes, RULE, ["p"]) == differing
    flat = of_rollouts(Sampled(episodes, [0], 1, 0.0, 0.0), RULE)["flat_groups"]
    assert flat == pytest.approx(1 - len(differing) / len(of_group))
    buffer = ReplayBuffer(9, 1.0, 0)
    buffer.add(episodes, groups_that_differ(episodes, RULE), RULE)
    assert {e.rollout.metadata["group"] for kept in buffer.kept for e in kept.episodes} == differing
    doctor = Evidence(episodes=episodes, settings={"advantage": "gdpo", "reward_weights": WEIGHTS})
    assert {g[0].rollout.metadata["group"] for g in doctor.groups if not doctor.is_flat(g)} == differing


def test_a_sum_alone_would_call_such_a_group_flat() -> None:
    pair = [graded("g", right=1, brief=0), graded("g", right=0.5, brief=1)]
    assert pair[0].reward == pair[1].reward
    assert groups_that_differ(pair, RULE) == {"g"}
    assert groups_that_differ(pair, replace(RULE, advantage="grpo")) == set()
    (one,), (other,) = advantages(pair, RULE)
    assert (one, other) == pytest.approx((1.0, -1.0)), "right weighs more than brief"


def test_replay_keeps_such_a_group_with_the_spread_of_its_parts() -> None:
    pair = [graded("g", right=0, brief=2), graded("g", right=1, brief=0)]
    buffer = ReplayBuffer(9, 1.0, 0)
    buffer.add(pair, groups_that_differ(pair, RULE), RULE)
    assert [kept.priority for kept in buffer.kept] == [1.0]


def test_flat_groups_stay_at_zero_and_are_dropped() -> None:
    episodes = [*(graded("g", right=r, brief=1) for r in (0, 1, 1)), *(graded("flat", right=1, brief=1),) * 2]
    (batch,) = credit(episodes, RULE)
    assert len(batch) == 3


def test_one_part_is_grpo_over_its_deviation() -> None:
    episodes = [graded(g, right=r) for g, r in zip("ggghhh", (0, 1, 1, 3, 4, 9), strict=True)]
    plain = np.array(advantages(episodes, CreditRule())).ravel()
    found = np.array(advantages(episodes, replace(RULE, weights={"right": 2.0}))).ravel()
    assert found == pytest.approx(plain / plain.std(), abs=1e-5)


def test_a_rollout_that_lacks_a_part_earned_nothing_of_it() -> None:
    lacking = [graded("g", right=1, brief=1), graded("g", right=1), graded("g", right=0, brief=1)]
    explicit = [*lacking[:1], graded("g", right=1, brief=0), *lacking[2:]]
    assert advantages(lacking, RULE) == advantages(explicit, RULE)


def test_a_plain_number_is_one_more_part() -> None:
    numbers = [episode("g", [(r, 0)], tokens=(1,)) for r in (0.0, 3.0)]
    assert advantages(numbers, RULE) == [[-1.0], [1.0]]
    mixed = [graded("g", right=1, brief=1), graded("g", right=0, brief=1), episode("g", [(0.0, 0)], tokens=(1,))]
    named = [*mixed[:2], graded("g", right=0, brief=0)]
    assert advantages(mixed, RULE) == advantages(named, RULE), "a failure that says 0"


def test_unwatched_and_weightless_parts_play_no_part() -> None:
    pair = [graded("g", right=1, other=0), graded("g", right=1, other=5)]
    rule = replace(RULE, weights={"right": 1.0, "other": 0.0})
    assert groups_that_differ(pair, rule) == set()


def test_a_penalty_for_length_is_one_more_part() -> None:
    pair = [graded("g", right=1, brief=1, tokens=(9,)), graded("g", right=1, brief=1, tokens=(1,))]
    assert groups_that_differ(pair, RULE) == set()
    rule = replace(RULE, overlong=(5, 0))
    assert groups_that_differ(pair, rule) == {"g"}
    assert advantages(pair, rule) == [[-1.0], [1.0]]


def test_masked_rollouts_change_nothing() -> None:
    good = [graded("g", right=1, brief=0), graded("g", right=0, brief=0)]
    failed = graded("g", right=-9, brief=9, outcome=Outcome.TIMEOUT)
    assert advantages([*good, failed], RULE)[:2] == advantages(good, RULE)
    assert groups_that_differ([good[0], failed], RULE) == set()


def test_agents_are_compared_with_their_like() -> None:
    def game(name: str, white: dict[str, float], black: dict[str, float]) -> Episode:
        both = episode("g", [], tokens=(1, 1), agents=("white", "black"), name=name)
        return replace(both, rewards=[Earned(0.0, 0, "white", False, white), Earned(0.0, 1, "black", False, black)])

    games = [game("a", {"right": 1, "brief": 0}, {"right": 5}), game("b", {"right": 0, "brief": 0}, {"right": 7})]
    assert advantages(games, RULE) == [[1.0, -1.0], [-1.0, 1.0]]


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({}, "reward_weights="),
        ({"reward_weights": {"right": 0.0}}, "reward_weights="),
        ({"reward_weights": WEIGHTS, "kl_coef": 0.1, "kl_in": "reward"}, "kl_in='loss'"),
        ({"reward_weights": WEIGHTS, "credit": "gae"}, "has no effect"),
        ({"reward_weights": WEIGHTS, "reward_scale": "source"}, "reward_scale.*has no effect"),
        ({"reward_weights": WEIGHTS, "group_size": 1}, "group_size must be at least 2"),
    ],
)
def test_what_it_does_not_go_with_is_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.GRPO(model="calc", advantage="gdpo", **given)


@dataclass(frozen=True, kw_only=True)
class Plain(Recorded):
    """Its rollouts earn numbers without names."""

    advantage: Any = "gdpo"
    reward_weights: Any = field(default_factory=lambda: dict(WEIGHTS))


@pytest.mark.parametrize("advantage", ["gdpo", "grpo"])
async def test_a_part_that_nobody_gives_is_said_once(tmp_path: Path, advantage: str) -> None:
    console = Listening()
    await run(tmp_path, Plain(steps=3, advantage=advantage), range(9), console=console)
    assert len([w for w in console.warnings if "'right' of reward_weights" in w]) == 1
