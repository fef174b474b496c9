"""A quorum of groups is enough for a step; slower groups come whole with a later one, and every task counts once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.measures import of_rollouts
from agentlightning.algorithm.sampling.rollouts import Stopped, run_validation
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import RolloutSource
from agentlightning.errors import ConfigError
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import RolloutStatus

TASKS, SIBLINGS = 12, 3


class Slow:
    """An agent that needs no model and waits, for some tasks, until it is let go."""

    def __init__(self, tasks: set[int]) -> None:
        self.tasks = tasks
        self.let_go = False

    async def __call__(self, task: int) -> float:
        while task in self.tasks and not self.let_go:  # noqa: ASYNC110 - agents run on a loop of their own
            await asyncio.sleep(0.01)
        return float(task)


@asynccontextmanager
async def sampling(
    tmp_path: Path, slow: Slow, algorithm: agl.GRPO, again: Sequence[int] = ()
) -> AsyncIterator[RolloutSource]:
    """The algorithm's sampling alone, with a runner beside it."""

    @agl.rollout
    async def agent(task: int) -> float:
        return await slow(task)

    store = InMemoryLightningStore()
    runner = LitAgentRunner(DummyTracer(), concurrency=64)
    runner.init(agent)
    runner.init_worker(0, store)
    reporter = Reporter(JsonlSink(tmp_path / "m.jsonl"), SilentConsole())
    context = TrainingContext(store=store, run_dir=tmp_path, reporter=reporter)
    schedule = TaskSchedule(range(TASKS), algorithm.tasks_per_step, seed=0)
    done = asyncio.Event()
    running = asyncio.create_task(runner.iter(done))
    try:
        yield RolloutSource(algorithm, context, schedule, again)
    finally:
        slow.let_go = True
        done.set()
        await running
        runner.teardown()
        reporter.close()
        await store.close()


def settings() -> agl.GRPO:
    return agl.GRPO(model="calc", group_size=SIBLINGS, tasks_per_step=4, quorum=0.5)


async def test_slow_groups_carry_over_and_every_task_counts_once(tmp_path: Path) -> None:
    first = TaskSchedule(range(TASKS), 4, seed=0).take(0, 4)[0]
    slow = Slow({first})
    steps: list[Sampled] = []
    async with asyncio.timeout(30), sampling(tmp_path, slow, settings()) as source:
        while True:
            position = steps[-1].position if steps else 0
            if position >= TASKS - 4:
                slow.let_go = True
            sampled = await source.sample(len(steps) + 1, position)
            if sampled is None:
                break
            steps.append(sampled)
    assert first in steps[0].carried
    assert first not in steps[0].tasks
    assert steps[-1].carried == []
    assert Counter(task for step in steps for task in step.tasks) == Counter(range(TASKS))
    for step in steps:
        found = Counter(episode.rollout.input for episode in step.episodes)
        assert found == dict.fromkeys(step.tasks, SIBLINGS), "groups are whole"
        assert len(step.tasks) + len(step.carried) <= 4
    assert all(len(step.tasks) >= 2 for step in steps[:-1]), "a quorum; the epoch's last step may have what is left"


async def test_what_a_killed_run_carried_is_sampled_again(tmp_path: Path) -> None:
    async with asyncio.timeout(30), sampling(tmp_path, Slow(set()), settings(), [7, 9]) as source:
        steps = [await source.sample(1, TASKS - 2)]
        while steps[-1] is not None:
            steps.append(await source.sample(len(steps) + 1, steps[-1].position))
    left = TaskSchedule(range(TASKS), 4, seed=0).take(TASKS - 2, 2)
    assert Counter(task for step in steps if step for task in step.tasks) == Counter([7, 9, *left])


async def test_stopping_cancels_what_is_carried(tmp_path: Path) -> None:
    slow = Slow(set(TaskSchedule(range(TASKS), 4, seed=0).take(0, 4)[:2]))
    async with asyncio.timeout(30), sampling(tmp_path, slow, settings()) as source:
        sampled = await source.sample(1, 0)
        assert sampled is not None
        assert len(sampled.carried) == 2
        slow.tasks = set(range(TASKS))
        waiting = asyncio.create_task(source.sample(2, sampled.position))
        await asyncio.sleep(0.2)
        source._context.stop.set()
        with pytest.raises(Stopped):
            await waiting
        rollouts = await source._context.store.query_rollouts(limit=-1)
        assert {r.status for r in rollouts} == {RolloutStatus.SUCCEEDED, RolloutStatus.CANCELLED}


async def test_dynamic_sampling_ends_with_the_epoch_though_its_last_groups_are_flat(tmp_path: Path) -> None:
    """All siblings earn the same, so each step goes through its fresh tasks in vain, and the last one runs out."""
    algorithm = agl.DAPO(model="calc", group_size=SIBLINGS, tasks_per_step=5, dynamic_sampling=1)
    steps: list[Sampled] = []
    async with asyncio.timeout(30), sampling(tmp_path, Slow(set()), algorithm) as source:
        while (found := await source.sample(len(steps) + 1, steps[-1].position if steps else 0)) is not None:
            steps.append(found)
    assert [(len(s.episodes), len(s.dropped)) for s in steps] == [(0, 10 * SIBLINGS), (0, 2 * SIBLINGS)]
    assert Counter(task for s in steps for task in s.tasks) == Counter(range(TASKS))
    summary = of_rollouts(steps[0], algorithm.credit_rule())
    assert (summary["rollouts"], summary["dropped"]) == (10 * SIBLINGS, 10 * SIBLINGS)
    assert summary["reward"] == pytest.approx(sum(steps[0].tasks) / 10), "of all that was sampled"


async def test_nothing_is_sampled_ahead_of_the_last_step(tmp_path: Path) -> None:
    algorithm = agl.GRPO(model="calc", group_size=SIBLINGS, tasks_per_step=4, steps=1, max_staleness=1)
    async with asyncio.timeout(30), sampling(tmp_path, Slow(set()), algorithm) as source:
        assert await source.sample(1, 0) is not None
        assert await source.sample(2, 4) is None


async def test_a_validation_that_is_stopped_has_no_result(tmp_path: Path) -> None:
    async with asyncio.timeout(30), sampling(tmp_path, Slow({1}), settings()) as source:
        validating = asyncio.create_task(run_validation(source._context, settings(), [0, 1], {"step": 0}))
        await asyncio.sleep(0.1)
        source._context.stop.set()
        assert await validating == {"val_reward": None}


async def test_a_failed_rollout_counts_0_in_validation_whatever_it_had_earned(tmp_path: Path) -> None:
    class Fails(Slow):
        async def __call__(self, task: int) -> float:
            agl.emit_reward(1.0)
            if task == 1:
                raise ValueError("after its reward")
            return 1.0

    async with asyncio.timeout(30), sampling(tmp_path, Fails(set()), settings()) as source:
        found = await run_validation(source._context, settings(), [0, 1, 2, 3], {"step": 0})
        assert found["val_reward"] == 0.75


def test_the_linear_rate_falls_with_the_tasks_learned() -> None:
    """With a quorum a run has more steps than its epochs would need, and the last ones learn too."""
    algorithm = agl.GRPO(model="calc", learning_rate=1.0, schedule="linear", epochs=2, tasks_per_step=4, quorum=0.5)
    rates = [algorithm.rate(done, taken, TASKS) for done, taken in [(0, 0), (3, 6), (9, 23)]]
    assert rates == pytest.approx([1.0, 0.75, 1 / 24])
    assert replace(algorithm, steps=10).rate(5, 23, TASKS) == 0.5


@pytest.mark.parametrize("wrong", [{"quorum": 0.0}, {"quorum": 1.5}, {"quorum": 0.5, "deterministic": True}])
def test_a_quorum_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="quorum"):
        agl.GRPO(model="calc", **wrong)  # pyright: ignore[reportArgumentType]


class Reads(InMemoryLightningStore):
    """Counts what is asked of it."""

    count = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("query_", "get_", "wait_", "statistics")):
            Reads.count += 1
        return super().__getattribute__(name)


async def test_a_step_of_128_rollouts_takes_a_handful_of_reads(tmp_path: Path) -> None:
    """Instead of some for each rollout. Besides these the status line reads the counters once a second."""
    algorithm = agl.GRPO(model="calc", group_size=8, tasks_per_step=16)
    async with asyncio.timeout(60), sampling(tmp_path, Slow(set()), algorithm) as source:
        inner = source._context.store
        reader = Reads.__new__(Reads)
        reader.__dict__.update(vars(inner))
        began, Reads.count = time.monotonic(), 0
        counted = RolloutSource(algorithm, replace(source._context, store=reader), TaskSchedule(range(16), 16, seed=0))
        sampled = await counted.sample(1, 0)
        assert sampled is not None
        assert len(sampled.episodes) == 128
        assert Reads.count - int(time.monotonic() - began) < 10
