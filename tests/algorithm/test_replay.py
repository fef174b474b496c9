"""The replay buffer draws groups by the spread of their rewards, forgets the oldest, and survives a checkpoint."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.episode import Earned, Episode
from agentlightning.algorithm.parts.replay import ReplayBuffer, chances
from agentlightning.errors import ConfigError

from .test_credit import episode


def group(name: str, *rewards: float) -> list[Episode]:
    return [episode(name, [(reward, 0)], tokens=(1,), name=f"{name}-{n}") for n, reward in enumerate(rewards)]


def names(episodes: list[Episode]) -> list[str]:
    return sorted({str(e.rollout.metadata["group"]) for e in episodes})


def filled(alpha: float = 1.0, size: int = 9) -> ReplayBuffer:
    buffer = ReplayBuffer(size, alpha, seed=0)
    episodes = [*group("wide", 0.0, 1.0), *group("narrow", 0.4, 0.6), *group("flat", 1.0, 1.0)]
    buffer.add(episodes, {"wide", "narrow", "flat"})
    return buffer


@pytest.mark.parametrize(("alpha", "wide"), [(0.0, 1 / 2), (1.0, 5 / 6), (2.0, 25 / 26)])
def test_a_group_is_drawn_by_the_deviation_of_its_rewards(alpha: float, wide: float) -> None:
    """Against the definition: P(i) = p_i^α / Σ p^α with deviations 0.5 and 0.1. A flat group is never kept."""
    buffer = filled(alpha)
    drawn = Counter(names(buffer.draw(1, step))[0] for step in range(2000))
    assert drawn.keys() == {"wide", "narrow"}
    assert drawn["wide"] / 2000 == pytest.approx(wide, abs=0.03)
    assert chances([0.5, 0.1], alpha) == pytest.approx([wide, 1 - wide])


def test_whole_groups_are_drawn_none_twice_and_the_same_ones_for_the_same_step() -> None:
    buffer = filled()
    assert names(buffer.draw(5, 1)) == ["narrow", "wide"]
    assert [e.rollout.rollout_id for e in buffer.draw(2, 1)] == ["wide-0", "wide-1", "narrow-0", "narrow-1"]
    assert names(buffer.draw(1, 7)) == names(filled().draw(1, 7))
    assert ReplayBuffer(4, 1.0, 0).draw(3, 1) == []


def test_the_oldest_leave_and_what_teaches_nothing_never_enters() -> None:
    buffer = ReplayBuffer(2, 1.0, seed=0)
    for step in range(4):
        buffer.add([*group(f"g{step}", 0.0, 1.0), *group(f"other{step}", 0.0, 1.0)], {f"g{step}"})
    assert names(buffer.draw(9, 1)) == ["g2", "g3"]


class Records:
    """A store that has these episodes."""

    def __init__(self, episodes: list[Episode]) -> None:
        self._have = {e.rollout.rollout_id: e for e in episodes}

    async def query_records(self, rollout_ids: list[str]) -> list[Any]:
        return [_Record(self._have[i]) for i in rollout_ids if i in self._have]


class _Record:
    def __init__(self, episode: Episode) -> None:
        self.rollout, self.attempt, self.calls, self.spans = episode.rollout, episode.attempt, episode.calls, ()


async def test_a_resumed_run_goes_on_with_the_groups_that_the_store_still_has() -> None:
    buffer, again = filled(), ReplayBuffer(9, 1.0, seed=0)
    store: Any = Records([*group("wide", 0.0, 1.0), *group("narrow", 0.4)])
    await again.return_to(store, buffer.state, {})
    assert names(again.draw(9, 1)) == ["wide"]
    assert again.state == buffer.state[:1]


def test_what_is_drawn_is_marked_and_what_is_kept_is_not() -> None:
    buffer = ReplayBuffer(4, 1.0, 0)
    buffer.add([episode("g", [(r, 0)], tokens=(1,), name=f"{r}") for r in (0.0, 1.0)], {"g"})
    assert [e.replayed for e in buffer.draw(1, 2)] == [True, True]
    assert not any(e.replayed for kept in buffer.kept for e in kept.episodes)


def test_what_is_replayed_is_corrected_for() -> None:
    assert agl.GRPO(model="calc", replay=2).correction_kind == "token"
    assert agl.GRPO(model="calc").correction_kind is None


@pytest.mark.parametrize(
    ("algorithm", "given", "cause"),
    [
        ("GRPO", {"replay": -1}, "at least 0"),
        ("GRPO", {"replay_size": 9}, "needs replay"),
        ("SFT", {"replay": 2}, "learns from rewards"),
        ("GRPO", {"replay": 2, "league": "pfsp"}, "no replay"),
    ],
)
def test_what_cannot_be_is_refused(algorithm: str, given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        getattr(agl, algorithm)(model="calc", **given)


def test_failed_rollouts_do_not_count_as_a_reward() -> None:
    one, two = group("g", 0.0, 1.0)
    failed = replace(two, attempt=two.attempt and two.attempt.model_copy(update={"outcome": agl.Outcome.AGENT_ERROR}))
    buffer = ReplayBuffer(4, 1.0, seed=0)
    buffer.add([one, failed], {"g"})
    assert buffer.kept == []
    assert np.isfinite(chances([1.0], 1.0)).all()


def test_a_zero_sum_game_is_kept_though_its_rewards_add_up_to_nothing() -> None:
    won, lost = group("g", 0.0, 0.0)
    episodes = [
        replace(won, rewards=[Earned(1.0, 0, "white"), Earned(-1.0, 0, "black")]),
        replace(lost, rewards=[Earned(-1.0, 0, "white"), Earned(1.0, 0, "black")]),
    ]
    buffer = ReplayBuffer(4, 1.0, 0)
    buffer.add(episodes, {"g"})
    assert [kept.priority for kept in buffer.kept] == [1.0]
