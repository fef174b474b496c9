"""A league draws earlier selves by its schedule, keeps those that are hard to beat, and goes on when it is resumed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.parts.league import Member, Opponents, of_opponents
from agentlightning.errors import ConfigError

from .fakes import CountingBackend
from .test_credit import episode


def pool(wins: list[float], **league: Any) -> Opponents:
    """Members that the policy wins so often against, oldest first; the first is the start."""
    members = [Member(f"member-{n}" if n else "start", f"step-{n}" if n else "start", f"/{n}" if n else None, won)
               for n, won in enumerate(wins)]  # fmt: skip
    return Opponents(agl.League(**league), "start", 0, members)


def drawn(opponents: Opponents, groups: int = 1000) -> dict[str, float]:
    counts = Counter(opponents.match(1, group)["opponent_name"] for group in range(groups))
    return {name: n / groups for name, n in counts.items()}


def played(name: str, rewards: list[float], group: str = "g") -> list[Episode]:
    found = [episode(group, [(reward, 0)], tokens=(1,), name=f"{name}-{group}-{n}") for n, reward in enumerate(rewards)]
    match = {"opponent_name": name, "group": group}
    return [replace(e, rollout=e.rollout.model_copy(update={"metadata": match})) for e in found]


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        ("latest", {"step-2": 1.0}),
        ("uniform", {"start": 1 / 3, "step-1": 1 / 3, "step-2": 1 / 3}),
        ("pfsp", {"start": 0.01 / 0.91, "step-1": 0.09 / 0.91, "step-2": 0.81 / 0.91}),  # (1 − p)²
        ("pfsp_even", {"start": 0.09 / 0.39, "step-1": 0.21 / 0.39, "step-2": 0.09 / 0.39}),  # p (1 − p)
    ],
)
def test_opponents_are_drawn_as_the_schedule_says(draw: str, expected: dict[str, float]) -> None:
    found = drawn(pool([0.9, 0.7, 0.1], draw=draw))
    assert found.keys() == expected.keys() or draw != "latest"
    for name, share in expected.items():
        assert found[name] == pytest.approx(share, abs=0.05), (draw, found)


def test_a_draw_of_ones_own_and_one_that_draws_nobody() -> None:
    assert drawn(pool([0.5, 0.5, 0.5], draw=lambda wins: np.arange(len(wins)) == 1)) == {"step-1": 1.0}
    with pytest.raises(ConfigError, match="nobody to play"):
        pool([0.5], draw=lambda wins: wins * 0).match(1, 0)


def test_siblings_play_the_same_opponent_from_the_same_seat_and_a_resumed_run_the_same_ones() -> None:
    one, two = pool([0.5] * 3, seats=2), pool([0.5] * 3, seats=2)
    assert [one.match(3, g) for g in range(20)] == [two.match(3, g) for g in range(20)]
    assert {one.match(3, g)["seat"] for g in range(20)} == {0, 1}


def test_win_rates_are_by_opponent_and_a_draw_is_half_a_win() -> None:
    episodes = [*played("start", [1.0, 0.5, 0.0, 0.2]), *played("step-1", [1.0, 1.0], group="h")]
    assert of_opponents(episodes, even=0.5) == {"opponent/start/win_rate": 0.375, "opponent/step-1/win_rate": 1.0}
    opponents = pool([0.5, 0.5], even=0.5)
    opponents.record(episodes)
    assert [m.wins for m in opponents.members] == pytest.approx([0.9 * 0.5 + 0.1 * 0.375, 0.55])
    assert [m.groups for m in opponents.members] == [1, 1]


class Exporting(CountingBackend):
    """Writes down who took up what."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[str, str]] = []
        vars(self.learners["policy"])["export"] = self.export

    async def export(self, uri: str) -> None: ...

    async def take_up(self, policy: str, uri: str) -> None:
        self.taken.append((policy, Path(uri).name))


async def test_the_one_that_is_beaten_most_surely_leaves_and_never_the_newest(tmp_path: Path) -> None:
    backend: Any = Exporting()
    opponents = Opponents(agl.League(size=3, every=2), "start")
    for step in range(1, 7):
        await opponents.grow(backend, "policy", tmp_path, step)
    assert [m.name for m in opponents.members] == ["start", "step-2", "step-4", "step-6"]
    for member, wins in zip(opponents.members, (0.99, 0.4, 0.8, 0.9), strict=True):
        member.wins = wins
    await opponents.grow(backend, "policy", tmp_path, 8)
    assert [m.name for m in opponents.members] == ["start", "step-2", "step-6", "step-8"]
    assert backend.taken[-1] == ("member-2", "step-000008"), "in the place of the one that left"
    assert opponents.match(9, 0)["pool"] == opponents.pool == ["member-1", "member-3", "member-2"], "oldest first"

    resumed, again = Opponents(opponents.league, "start"), Exporting()
    await resumed.return_to(again, opponents.state)  # pyright: ignore[reportArgumentType]
    assert resumed.state == opponents.state
    assert again.taken == [("member-1", "step-000002"), ("member-3", "step-000006"), ("member-2", "step-000008")]


async def test_a_backend_that_holds_no_opponents_is_refused(tmp_path: Path) -> None:
    backend: Any = CountingBackend()
    vars(backend.learners["policy"])["export"] = Exporting().export
    with pytest.raises(ConfigError, match="take_up"):
        await Opponents(agl.League(every=1), "start").grow(backend, "policy", tmp_path, 1)


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ({"league": agl.League(), "max_staleness": 1}, "wait for all rollouts"),
        ({"league": agl.League(), "policies": ["a", "b"]}, "for one policy"),
        ({"league": agl.League(), "policies": ["member-1"]}, "call the policy otherwise"),
    ],
)
def test_settings_that_cannot_go_with_a_league_are_refused(settings: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.GRPO(model="calc", **settings)


@pytest.mark.parametrize("wrong", [{"draw": "best"}, {"size": 0}, {"every": 1.5}])
def test_a_league_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        agl.League(**wrong)


def test_a_league_names_its_policy_and_what_it_began_as() -> None:
    spec = agl.GRPO(model="calc", league=agl.League(size=2)).policy.model
    assert (spec.trained, spec.frozen, list(spec.members)) == (["player"], "start", ["member-1", "member-2"])


def test_it_may_be_given_as_a_word_or_as_a_file_has_it() -> None:
    assert agl.GRPO(model="calc", league="uniform").plays == agl.League(draw="uniform")
    assert agl.GRPO(model="calc", league={"size": 2, "every": 3}).plays == agl.League(size=2, every=3)
    with pytest.raises(ConfigError, match="Did you mean every"):
        agl.GRPO(model="calc", league={"evry": 3})
