"""Constraints: the multiplier's numbers, what it takes from rewards, checkpoints, what is said of a broken one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agentlightning as agl
from agentlightning.algorithm.checkpoint import list_checkpoints, read_checkpoint
from agentlightning.algorithm.credit.assignment import groups_that_differ
from agentlightning.algorithm.episode import Earned, Episode, Sampled
from agentlightning.algorithm.parts.constraint import as_constraints, verdict
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import FinishedRollouts, RolloutSource, Source
from agentlightning.algorithm.update import Updater
from agentlightning.cli.configuration import make_algorithm
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_steps import step_findings
from agentlightning.errors import ConfigError
from agentlightning.litagent import FunctionAgent
from agentlightning.metrics import Reporter, read_metrics
from agentlightning.trainer.live import describe
from agentlightning.types import Outcome

from .fakes import CountingLearner
from .test_credit import episode
from .test_loop import Recorded, run
from .test_watched import Listening

CHEAP = agl.Constraint("cost", at_most=0.2, rate=0.5, ceiling=3.0)


def paid(right: float, cost: float | None, name: str = "r", **given: Any) -> Episode:
    parts = {"right": right} if cost is None else {"right": right, "cost": cost}
    one = episode("g", [(right, 0)], tokens=(1,), name=name, **given)
    return replace(one, rewards=[Earned(right, 0, parts=parts)])


def updater(constraint: Any, **given: Any) -> tuple[Updater, Any, Listening]:
    learner: Any = CountingLearner()
    console = Listening()
    settings = agl.GRPO(model="calc", constraint=constraint, **{"advantage": "drgrpo", **given})
    return Updater(settings, learner, Reporter(console)), learner, console


@pytest.mark.slow
@given(st.lists(st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=4), min_size=1, max_size=6), st.booleans())
async def test_the_multiplier_climbs_and_falls_within_its_bounds(steps: list[list[float]], below: bool) -> None:
    bound = {"at_most": 0.2} if below else {"at_least": 0.2}
    one, _, _ = updater(agl.Constraint("cost", rate=0.5, ceiling=1.5, **bound))
    value = 0.0
    for costs in steps:
        metrics = await one.learn([paid(n, c, f"r{n}") for n, c in enumerate(costs)], 0.1)
        assert metrics["constraint/cost"] == pytest.approx(value)
        gap = np.mean(costs) - 0.2
        value = float(np.clip(value + 0.5 * (gap if below else -gap), 0.0, 1.5))
    assert one.parts.state()["constraint"] == {"cost": pytest.approx(value)}


async def learned(one: Updater, learner: Any, episodes: list[Episode]) -> list[float]:
    await one.learn(episodes, 0.1)
    return learner.batches[-1].advantages_E.tolist()


async def test_its_price_is_taken_from_the_reward() -> None:
    one, learner, _ = updater(CHEAP)
    await one.parts.load({"constraint": {"cost": 2.0}})
    pair = [paid(1.0, 0.7, "a"), paid(0.0, 0.1, "b")]
    assert await learned(one, learner, pair) == pytest.approx([-0.1, 0.1]), "1 − 1.4 against 0 − 0.2"


async def test_of_a_part_that_shall_be_large_the_price_is_added() -> None:
    one, learner, _ = updater(agl.Constraint("cost", at_least=0.2))
    await one.parts.load({"constraint": {"cost": 2.0}})
    assert await learned(one, learner, [paid(1.0, 0.7, "a"), paid(0.0, 0.1, "b")]) == pytest.approx([1.1, -1.1])


async def test_a_multiplier_of_zero_changes_no_bit() -> None:
    pair = [paid(1.0, 0.7, "a"), paid(0.3, 0.1, "b"), paid(0.1, None, "c")]
    with_it, without = updater(CHEAP), updater(None)
    assert await learned(with_it[0], with_it[1], pair) == await learned(without[0], without[1], pair)


async def test_with_gdpo_it_is_compared_as_a_part_of_its_own() -> None:
    one, learner, _ = updater(CHEAP, advantage="gdpo", reward_weights={"right": 1.0})
    await one.parts.load({"constraint": {"cost": 1.5}})
    found = await learned(one, learner, [paid(1.0, 0.7, "a"), paid(0.0, 0.1, "b"), paid(0.0, 0.7, "c")])
    right, cost = np.array([1.0, 0.0, 0.0]), np.array([0.7, 0.1, 0.7])
    total = (right - right.mean()) / right.std() - 1.5 * (cost - cost.mean()) / cost.std()
    assert found == pytest.approx((total / total.std()).tolist(), abs=1e-5)


async def test_rollouts_that_are_left_out_or_learned_again_do_not_move_it() -> None:
    one, _, _ = updater(CHEAP)
    good = [paid(1.0, 0.4, "a"), paid(0.0, 0.4, "b")]
    others = [paid(1.0, 9.0, "c", outcome=Outcome.TIMEOUT), replace(paid(1.0, 9.0, "d"), replayed=True)]
    await one.learn([*good, *others], 0.1)
    assert one.parts.state()["constraint"] == {"cost": pytest.approx(0.1)}


async def test_a_part_that_nobody_gives_is_said_once_and_moves_nothing() -> None:
    one, _, console = updater(CHEAP)
    for _ in range(2):
        await one.learn([paid(1.0, None, "a"), paid(0.0, None, "b")], 0.1)
    assert one.parts.state()["constraint"] == {"cost": 0.0}
    assert len([w for w in console.warnings if "'cost', which has a constraint" in w]) == 1


def test_siblings_that_differ_in_it_differ() -> None:
    pair = [paid(1.0, 0.7, "a"), paid(1.0, 0.1, "b")]
    assert groups_that_differ(pair, agl.GRPO(model="calc", constraint=CHEAP).credit_rule()) == {"g"}
    assert groups_that_differ(pair, agl.GRPO(model="calc").credit_rule()) == set()
    recorded = Evidence(episodes=pair, settings={"constraint": {"part": "cost", "at_most": 0.2}})
    assert not recorded.is_flat(pair)
    assert Evidence(episodes=pair).is_flat(pair)


class CostlySource(RolloutSource):
    """Each step has the same two rollouts; the better one costs more than it may."""

    async def sample(self, step: int, position: int) -> Sampled | None:
        if step > (self._settings.steps or 0):
            return None
        found = [paid(r, r, f"{step}-{r}") for r in (0.0, 1.0)]
        return Sampled(found, [position], position + 1, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Costly(Recorded):
    advantage: Any = "drgrpo"
    constraint: Any = field(default_factory=lambda: CHEAP)

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        return CostlySource(self, self.context, schedule, again)


async def test_a_run_raises_it_until_it_outweighs_the_reward_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    learner = await run(whole, Costly(steps=12), range(99))
    rows = [row["constraint/cost"] for row in read_metrics(whole / "m.jsonl")]
    assert rows == pytest.approx([0.15 * n for n in range(12)])
    better = [batch.advantages_E[1] for batch in learner.batches]
    assert better[0] > 0 > better[-1]
    await run(halves, Costly(steps=6, save_every=6), range(99))
    (*_, last) = list_checkpoints(halves)
    assert list(read_checkpoint(last).learning.values()) == [{"constraint": {"cost": pytest.approx(0.9)}}]
    resumed = await run(halves, Costly(steps=12), range(99), resume=last)
    assert [b.advantages_E.tobytes() for b in resumed.batches] == [
        b.advantages_E.tobytes() for b in learner.batches[6:]
    ]


def rows_of(costs: Sequence[float], multiplier: float) -> list[dict[str, Any]]:
    return [{"step": n, "reward/cost": c, "constraint/cost": multiplier} for n, c in enumerate(costs, 1)]


@pytest.mark.parametrize(
    ("costs", "multiplier", "said"),
    [
        ([0.5, 0.6] * 6, 3.0, "at its ceiling of 3"),
        ([0.5, 0.6] * 6, 1.0, "its multiplier is 1"),
        ([0.9] * 20 + [0.1, 0.2] * 4, 1.0, None),
        ([0.1, 0.32] * 6, 1.0, None),
        ([0.5] * 4, 1.0, None),
    ],
)
def test_the_doctor_says_that_it_is_broken_at_the_end(costs: list[float], multiplier: float, said: str | None) -> None:
    settings = {"constraint": [{"part": "cost", "at_most": 0.2, "ceiling": 3.0}]}
    evidence = Evidence(steps=rows_of(costs, multiplier), settings=settings)
    found = [f for f in step_findings(evidence) if f.code == "constraint_not_met"]
    assert [said in f.words for f in found if said] == ([True] if said else [])
    assert bool(found) == bool(said)


def test_a_constraint_that_is_kept_on_the_bound_is_seldom_called_broken() -> None:
    rng = np.random.default_rng(0)
    found = [verdict(CHEAP, rng.normal(0.2, 0.1, 20).tolist(), 1.0) for _ in range(400)]
    assert sum(f is not None for f in found) / len(found) < 0.06


def test_it_is_read_from_files_and_repeated_from_a_runs_file(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("algorithm: GRPO\nmodel: calc\nconstraint: {part: cost, at_most: 0.02}\n")
    one = make_algorithm(None, None, tmp_path / "one.yaml", [])
    assert as_constraints(one.constraint) == (agl.Constraint("cost", at_most=0.02),)
    several = make_algorithm(None, None, tmp_path / "one.yaml", ['constraint=[{"part": "a", "at_least": 1}]'])
    assert as_constraints(several.constraint) == (agl.Constraint("a", at_least=1),)
    for setting in (CHEAP, [CHEAP, agl.Constraint("tone", at_least=0.5)]):
        describe(tmp_path, agl.GRPO(model="calc", constraint=setting), FunctionAgent(lambda task: 1.0))
        recorded = json.loads((tmp_path / "run.json").read_text())["settings"]["constraint"]
        assert as_constraints(recorded) == as_constraints(setting)
        again = make_algorithm(None, None, tmp_path / "run.json", [])
        assert as_constraints(again.constraint) == as_constraints(setting)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"constraint": {"part": "cost"}}, "one bound"),
        ({"constraint": {"part": "cost", "at_most": 1, "at_least": 0}}, "one bound"),
        ({"constraint": {"part": "cost", "at_most": float("nan")}}, "must be a number"),
        ({"constraint": {"part": "cost", "at_most": 1, "rate": 0}}, "above 0"),
        ({"constraint": {"part": "cost", "at_most": 1, "celling": 0}}, "celling"),
        ({"constraint": {"part": "", "at_most": 1}}, "name of a part"),
        ({"constraint": {"at_most": 1}}, "constraint needs part"),
        ({"constraint": "cost"}, "it takes agl.Constraint"),
        ({"constraint": [CHEAP, CHEAP]}, "two bounds on 'cost'"),
        ({"constraint": CHEAP, "watched_parts": ["cost"]}, "'cost' is in watched_parts"),
        ({"constraint": CHEAP, "advantage": "maxrl"}, "rewards of at least 0.*Leave constraint out"),
        ({"constraint": CHEAP, "credit": "teacher", "teacher": "calc"}, "has no effect here"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.GRPO(model="calc", **given)
