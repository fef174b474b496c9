"""Curricula draw what teaches, and mixtures hold their shares; both go on where an interrupted run stopped."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agentlightning as agl
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.measures import of_rollouts
from agentlightning.algorithm.parts.curriculum import (
    CURRICULA,
    POOLS,
    TaskDraw,
    TaskHistory,
    TaskRecords,
    learnability,
    pools,
    unsolved,
)
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.errors import ConfigError

from .test_quorum import SIBLINGS, Slow, sampling

EASY, HARD, LEARNABLE = range(0, 10), range(10, 20), range(20, 30)


def earned(task: int, rng: np.random.Generator) -> list[float]:
    chance = 1.0 if task in EASY else (0.0 if task in HARD else 0.5)
    return (rng.random(8) < chance).astype(float).tolist()


def drawn_after(curriculum: Callable[[TaskRecords], Any], steps: int = 20) -> Counter[str]:
    """What kinds of tasks are drawn, six a step, in the second half of the steps."""
    draw = TaskDraw(curriculum, range(30))
    schedule = TaskSchedule(range(30), 6, 0, draw)
    rng, kinds = np.random.default_rng(1), Counter[str]()
    for step in range(steps):
        tasks = schedule.take(step * 6, 6)
        assert len(set(tasks)) == 6
        for task in tasks:
            draw.history.record(task, earned(task, rng))
            if step >= steps // 2:
                kinds["easy" if task in EASY else "hard" if task in HARD else "learnable"] += 1
    return kinds


def test_tasks_that_teach_are_drawn_more() -> None:
    kinds = drawn_after(learnability)
    assert kinds["learnable"] > 0.55 * kinds.total(), kinds
    assert kinds["easy"] > 0 < kinds["hard"], "they are looked at again, for the policy changes"


def test_solved_tasks_are_retired() -> None:
    kinds = drawn_after(unsolved)
    assert kinds["easy"] == 0
    assert abs(kinds["hard"] - kinds["learnable"]) < 0.3 * kinds.total()


def test_pools_have_their_shares() -> None:
    kinds = drawn_after(pools, steps=200)
    shares = {name: n / kinds.total() for name, n in kinds.items()}
    assert shares == pytest.approx({"easy": POOLS["easy"], "hard": POOLS["hard"], "learnable": 0.5}, abs=0.1)


def test_the_variance_by_hand() -> None:
    history = TaskHistory(learnability, 3)
    history.record(0, [0.0, 2.0])
    history.record(0, [2.0, 2.0])
    history.record(1, [])
    records = history.records
    assert records.visits_T.tolist() == [2, 0, 0]
    assert records.reward_T[0] == pytest.approx((0.5 + 1.0) / 2), "scaled to what the run has seen"
    assert (records.variance_T[0], records.last_T[0]) == (pytest.approx(0.125), 1.0)
    assert learnability(records) == pytest.approx([(2 * 0.125 + 0.25) / 3, 0.25, 0.25])


@pytest.mark.parametrize("name", CURRICULA)
async def test_what_is_known_survives_a_checkpoint(name: str) -> None:
    rng = np.random.default_rng(2)
    first, second = (TaskDraw(CURRICULA[name], range(30)) for _ in range(2))
    for task in range(30):
        first.history.record(task, earned(task, rng))
    await second.load(json.loads(json.dumps(first.state())))
    assert [second.choose(p, 6, ()) for p in (30, 36)] == [first.choose(p, 6, ()) for p in (30, 36)]


def test_solved_altogether_is_no_end() -> None:
    history = TaskHistory(unsolved, 2)
    history.record(0, [0.0, 1.0])
    for task in (0, 1):
        history.record(task, [1.0, 1.0])
    assert sorted(history.draw(2, np.random.default_rng(0))) == [0, 1]


def test_a_curriculum_of_ones_own_is_checked() -> None:
    assert TaskHistory(lambda records: np.array([0.0, 1.0, 0.0]), 3).draw(3, np.random.default_rng(0)) == [1]
    for bad in (lambda _: np.ones(2), lambda _: -np.ones(3), lambda _: np.zeros(3)):
        with pytest.raises(ConfigError, match="curriculum"):
            TaskHistory(bad, 3).draw(1, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="curriculum is 'magic'; it can be 'learnability'"):
        agl.GRPO(model="calc", curriculum="magic")
    with pytest.raises(ConfigError, match="takes the records"):
        agl.GRPO(model="calc", curriculum=lambda: np.ones(1))  # pyright: ignore[reportArgumentType]


async def test_a_run_tells_its_curriculum_what_was_earned(tmp_path: Path) -> None:
    """The agent earns the number of its task, so no group differs, and only unknown tasks are learnable."""
    algorithm = agl.GRPO(model="calc", group_size=SIBLINGS, tasks_per_step=4, curriculum="learnability")
    async with sampling(tmp_path, Slow(set()), algorithm) as source:
        draw = TaskDraw(learnability, range(8))
        source._schedule = TaskSchedule(range(8), 4, 0, draw)
        found = await source.sample(1, 0)
        assert found is not None
        assert {int(task): of[3] for task, of in draw.state().items()} == {task: float(task) for task in found.tasks}


# ---- mixtures ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 20), st.integers(1, 20), st.floats(0.1, 0.9))
def test_a_mixture_has_its_shares_and_every_task(a: int, b: int, share: float) -> None:
    weights = {"a": share, "b": 1 - share}
    mixture = agl.Mixture({"a": [("a", i) for i in range(a)], "b": [("b", i) for i in range(b)]}, weights)
    tasks = [mixture[i] for i in range(len(mixture))]
    assert {*tasks} == {*(("a", i) for i in range(a)), *(("b", i) for i in range(b))}
    counted = sum(name == "a" for name, _ in tasks)
    assert abs(counted - share * len(mixture)) <= 1
    assert all(mixture.source(i) == tasks[i][0] for i in range(len(mixture)))


def test_tasks_are_rated_within_their_own_data_set() -> None:
    """Points from 0 to 100 beside wins of 0 and 1: both data sets teach alike, and a won task is a solved one."""
    mixture = agl.Mixture({"points": [1, 2], "wins": [3, 4]})
    seen: list[TaskRecords] = []

    def weigh(records: TaskRecords) -> Any:
        seen.append(records)
        return learnability(records)

    draw = TaskDraw(weigh, mixture)
    for task, rewards in enumerate([[0.0, 100.0], [100.0, 100.0], [0.0, 1.0], [1.0, 1.0]]):
        draw.history.record(task, rewards)
    draw.choose(4, 4, ())
    assert learnability(seen[-1]).tolist() == [0.25, 0.125, 0.25, 0.125]
    assert unsolved(seen[-1]).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_what_is_known_of_a_task_that_comes_around_several_times_is_known_once() -> None:
    mixture = agl.Mixture({"large": list(range(10)), "small": ["a", "b"]}, {"large": 0.5, "small": 0.5})
    schedule = TaskSchedule(mixture, 5, 0)
    taken = [task for position in range(0, len(mixture), 5) for task in schedule.take(position, 5)]
    assert sorted(mixture[task] for task in taken if task >= 10) == ["a"] * 5 + ["b"] * 5
    assert len({*taken}) == 12, "a task has one index, by which baselines and curricula know it"
    solved = TaskDraw(unsolved, mixture)
    for reward in (0.0, 1.0):
        solved.history.record(10, [reward, reward])
    assert 10 not in solved.choose(0, 20, ()), "retired in all its places"


async def test_rounds_of_dynamic_sampling_draw_no_task_twice(tmp_path: Path) -> None:
    """No group differs, so each round is sampled anew, from the tasks that the step has not had."""
    given = {"group_size": SIBLINGS, "tasks_per_step": 4, "dynamic_sampling": 3, "curriculum": "learnability"}
    algorithm = agl.GRPO(model="calc", **given)  # pyright: ignore[reportArgumentType]
    async with sampling(tmp_path, Slow(set()), algorithm) as source:
        source._schedule = TaskSchedule(range(10), 4, 0, TaskDraw(learnability, range(10)))
        found = await source.sample(1, 0)
        assert found is not None
        assert sorted(found.tasks) == list(range(10))


def test_a_mixture_that_cannot_be_is_refused() -> None:
    assert len(agl.Mixture({"a": [1, 2], "b": [3]})) == 3
    for datasets, weights in [({}, None), ({"a": []}, None), ({"a": [1]}, {"b": 1.0}), ({"a": [1]}, {"a": 0.0})]:
        with pytest.raises(ConfigError, match="mixture"):
            agl.Mixture(datasets, weights)  # pyright: ignore[reportArgumentType]
    with pytest.raises(IndexError):
        agl.Mixture({"a": [1]})[1]


async def test_each_data_set_of_a_mixture_has_a_reward_of_its_own(tmp_path: Path) -> None:
    algorithm = agl.GRPO(model="calc", group_size=SIBLINGS, tasks_per_step=4)
    async with sampling(tmp_path, Slow(set()), algorithm) as source:
        source._schedule = TaskSchedule(agl.Mixture({"low": [1, 2], "high": [5, 7]}), 4, 0)
        found = await source.sample(1, 0)
        assert found is not None
        measured = of_rollouts(found, CreditRule())
        assert (measured["source/low/reward"], measured["source/high/reward"]) == (1.5, 6.0)
        assert isinstance(found, Sampled)
