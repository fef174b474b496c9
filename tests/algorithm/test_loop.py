"""The loop itself, with recorded rollouts and a learner that only counts: what is rated, kept, reported, stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import agentlightning as agl
from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.checkpoint import list_checkpoints, read_checkpoint
from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.parts.curriculum import TaskDraw, as_curriculum
from agentlightning.algorithm.run import TrainingRun
from agentlightning.algorithm.sampling.rollouts import run_validation
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import FinishedRollouts, RolloutSource, Source
from agentlightning.errors import ConfigError
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole, read_metrics
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptStatus, Outcome

from .fakes import CountingBackend, CountingLearner
from .test_credit import episode


class RecordedRun(TrainingRun):
    """Validations give the rewards that are left."""

    async def _validation(self, dataset: Any) -> dict[str, float | None]:
        assert isinstance(self.settings, Recorded)
        if self.settings.val_rewards[0] is None:
            self.context.stop.set()
        return {"val_reward": self.settings.val_rewards.pop(0)}


class RecordedSource(RolloutSource):
    """Each step has the same two rollouts."""

    async def sample(self, step: int, position: int) -> Sampled | None:
        episodes = [episode("g", [(r, 1)], name=f"{step}-{r}") for r in (0.0, 1.0)]
        return None if self.is_over(position) else Sampled(episodes, [position], position + 1, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Recorded(agl.GRPO):
    """Each step has the same two rollouts; validations give the rewards that are left."""

    model: str = "calc"
    tasks_per_step: int = 1
    group_size: int = 2
    check_packing_every: int = 0
    val_rewards: list[float | None] = field(default_factory=list)

    def make_run(self, train: Any, val: Any) -> TrainingRun:
        return RecordedRun(self, self.context, train, val, self.make_source)

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        return RecordedSource(self, self.context, schedule, again)


async def run(
    tmp_path: Path,
    algorithm: agl.GRPO,
    tasks: Any,
    val: Any = None,
    *,
    stopped: bool = False,
    resume: Path | None = None,
    console: SilentConsole | None = None,
) -> CountingLearner:
    backend = CountingBackend()
    store, reporter = (
        InMemoryLightningStore(),
        Reporter(JsonlSink(tmp_path / "m.jsonl", 3 if resume else 0), console or SilentConsole()),
    )
    algorithm.attach(
        TrainingContext(store=store, run_dir=tmp_path, reporter=reporter, backend=backend, resume_from=resume)
    )
    if stopped:
        algorithm.context.stop.set()
    try:
        await algorithm.run(tasks, val)
    finally:
        reporter.close()
        await store.close()
    return backend.learner("policy")


class SteppedSource(RolloutSource):
    """Each step has a group of its own."""

    async def sample(self, step: int, position: int) -> Sampled | None:
        episodes = [episode(f"{step}", [(r, 1)], name=f"{step}-{r}") for r in (0.0, 1.0)]
        return Sampled(episodes, [position], position + 1, 0.0, 0.0)


@pytest.mark.skipif(find_spec("fsspec") is None, reason="fsspec is in the extra `fsspec`")
@pytest.mark.parametrize("in_the_way", [False, True])
async def test_checkpoints_are_copied_and_a_copy_that_fails_ends_no_run(tmp_path: Path, in_the_way: bool) -> None:
    place = tmp_path / "shared"
    if in_the_way:
        place.write_text("")
    learner = await run(tmp_path, Recorded(steps=3, save_every=1, checkpoint_copy=f"file://{place}/run"), range(9))
    assert learner.version == 3
    kept = [checkpoint.name for checkpoint in list_checkpoints(tmp_path)]
    assert sorted(path.parent.name for path in place.glob("run/*/checkpoint.json")) == ([] if in_the_way else kept)


@dataclass(frozen=True, kw_only=True)
class Replaying(Recorded):
    """Learns one group of an earlier step again in each."""

    replay: int = 1  # pyright: ignore[reportIncompatibleVariableOverride, reportIncompatibleUnannotatedOverride]
    replay_size: int = 2

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        return SteppedSource(self, self.context, schedule, again)


async def test_a_step_learns_from_earlier_steps_too_and_reports_its_own_rewards(tmp_path: Path) -> None:
    learner = await run(tmp_path, Replaying(steps=4), range(100))
    assert [len(set(batch.group_E.tolist())) for batch in learner.batches] == [1, 2, 2, 2]
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [m["replayed"] for m in rows] == [0, 2, 2, 2]
    assert [m["rollouts"] for m in rows] == [2] * 4
    (*_, last) = list_checkpoints(tmp_path)
    assert [one["rollouts"] for one in read_checkpoint(last).parts["replay"]] == [
        ["3-0.0", "3-1.0"],
        ["4-0.0", "4-1.0"],
    ]


async def test_the_best_checkpoint_is_one_that_was_validated_itself(tmp_path: Path) -> None:
    algorithm = Recorded(steps=8, val_every=2, save_every=1, keep_checkpoints=1, val_rewards=[0.1, 0.9, 0.5, 0.5, 0.5])
    await run(tmp_path, algorithm, range(100), range(3))
    kept = [read_checkpoint(c) for c in list_checkpoints(tmp_path)]
    assert [(c.step, c.val_reward) for c in kept] == [(2, 0.9), (8, 0.5)], "step 3 was not measured"


async def test_validation_can_be_switched_off_with_its_tasks_given(tmp_path: Path) -> None:
    await run(tmp_path, Recorded(steps=2, val_every=0, val_rewards=[]), range(100), range(3))
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [m["step"] for m in rows] == [1, 2]
    assert not any("val_reward" in m for m in rows)


@pytest.mark.parametrize(
    ("every", "before", "validated"),
    [(1, None, [0, 1, 2]), (1, False, [1, 2]), (0, True, [0]), (0, None, []), (0, False, [])],
)
async def test_the_validation_before_the_first_step_has_a_setting_of_its_own(
    tmp_path: Path, every: int, before: bool | None, validated: list[int]
) -> None:
    algorithm = Recorded(steps=2, val_every=every, val_before=before, val_rewards=[0.5] * len(validated))
    await run(tmp_path, algorithm, range(100), range(3))
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [m["step"] for m in rows if m.get("val_reward") is not None] == validated


async def test_a_stop_during_validation_loses_no_step_of_the_metrics(tmp_path: Path) -> None:
    algorithm = Recorded(steps=8, val_every=3, save_every=10, val_rewards=[0.1, None])
    await run(tmp_path, algorithm, range(100), range(3))
    assert [m["step"] for m in read_metrics(tmp_path / "m.jsonl")] == [0, 1, 2, 3]
    assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [0, 3]


async def test_a_validation_that_was_stopped_rates_nothing(tmp_path: Path) -> None:
    algorithm = Recorded(steps=8, val_every=1, save_every=1, val_rewards=[0.1, 0.9, None])
    await run(tmp_path, algorithm, range(100), range(3))
    assert [read_checkpoint(c).val_reward for c in list_checkpoints(tmp_path)] == [0.9, None]


async def test_training_on_chats_can_be_stopped(tmp_path: Path) -> None:
    chats: Sequence[Any] = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]] * 4
    learner = await run(tmp_path, agl.SFT(model="calc", source="chats", epochs=50), chats, stopped=True)
    assert learner.version == 0


async def test_a_run_on_chats_reports_what_it_has_and_no_rewards(tmp_path: Path) -> None:
    chats: Sequence[Any] = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]] * 5
    await run(tmp_path, agl.SFT(model="calc", source="chats", epochs=3, tasks_per_step=2), chats)
    rows = read_metrics(tmp_path / "m.jsonl")
    assert [row["examples"] for row in rows] == [2, 2, 1] * 3
    assert {row["steps"] for row in rows} == {len(rows)}
    assert all("loss" in row and row["tokens"] > 0 for row in rows)
    of_rewards = ("reward", "rollouts", "flat", "failed", "outcomes", "truncated", "cut_off")
    assert not [name for row in rows for name in row if name.startswith(of_rewards)]


@settings(max_examples=50, deadline=None)
@given(
    tasks=st.integers(1, 40),
    per_step=st.integers(1, 20),
    epochs=st.integers(1, 4),
    drawn=st.booleans(),
    before=st.tuples(st.integers(1, 20), st.integers(0, 9)),
)
def test_as_many_steps_are_announced_as_are_taken(
    tasks: int, per_step: int, epochs: int, drawn: bool, before: tuple[int, int]
) -> None:
    """Also of a run that was begun with another number of tasks a step; `before`: that, and how many steps it made."""
    made = agl.GRPO(
        model="calc", tasks_per_step=per_step, group_size=2, epochs=epochs, curriculum="learnability" if drawn else None
    )
    weigh = as_curriculum(made.curriculum)
    schedule = TaskSchedule(range(tasks), per_step, 0, TaskDraw(weigh, range(tasks)) if weigh else None)
    position = done = 0
    earlier = TaskSchedule(range(tasks), before[0], 0, TaskDraw(weigh, range(tasks)) if weigh else None)
    while done < before[1] and earlier.epochs_taken(position) < epochs:
        position += len(earlier.take(position, earlier.per_step))
        done += 1
    announced, steps = made.steps_of(tasks, done, position), done
    while schedule.epochs_taken(position) < epochs:
        position += len(schedule.take(position, schedule.per_step))
        steps += 1
    assert announced == steps


@pytest.mark.parametrize("val", [None, []])
async def test_nothing_to_validate_on_is_no_validation(tmp_path: Path, val: Any) -> None:
    await run(tmp_path, Recorded(epochs=1), range(3), val)
    assert all("val_reward" not in m for m in read_metrics(tmp_path / "m.jsonl"))


async def test_all_validations_of_a_run_draw_alike(tmp_path: Path) -> None:
    store, wanted = InMemoryLightningStore(), agl.GRPO(model="calc", val_repeats=2)
    reporter = Reporter(JsonlSink(tmp_path / "m.jsonl", 0), SilentConsole())
    context = TrainingContext(store=store, run_dir=tmp_path, reporter=reporter, backend=CountingBackend())
    for step in (0, 1):
        validating = asyncio.create_task(run_validation(context, wanted, ["a", "b"], {"step": step}))
        for _ in range(4):
            claim = await store.dequeue_rollout("worker", timeout=5)
            assert claim is not None
            at = (claim.rollout_id, claim.attempt.attempt_id)
            await store.update_attempt(*at, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK)
        await validating
    seeds: dict[int, list[int]] = {0: [], 1: []}
    for rollout in await store.query_rollouts():
        seeds[rollout.metadata["step"]].append(rollout.metadata["sampling_seed"])
    assert sorted(seeds[0]) == sorted(seeds[1])
    assert len(set(seeds[0])) == 4
    reporter.close()
    await store.close()


@pytest.mark.parametrize(
    ("more", "tasks", "cause"),
    [
        ({"seed": 1}, 9, "seed=0, and this one has 1"),
        ({"model": "other"}, 9, "model='calc', and this one has 'other'"),
        ({"lora_rank": 4}, 9, "lora_rank=None, and this one has 4"),
        ({"policies": ["a"]}, 9, "policies"),
        ({}, 8, "tasks=9, and this one has 8"),
    ],
)
async def test_a_run_with_other_settings_cannot_be_resumed(
    tmp_path: Path, more: dict[str, Any], tasks: int, cause: str
) -> None:
    """Its weights, its optimiser or the order of its tasks would be others."""
    await run(tmp_path, Recorded(steps=2, save_every=1), range(9))
    (_, last) = list_checkpoints(tmp_path)
    with pytest.raises(ConfigError, match=cause) as caught:
        await run(tmp_path, Recorded(**{"steps": 4, **more}), range(tasks), resume=last)
    assert f"model='{last / 'model'}'" in str(caught.value)
    await run(tmp_path, Recorded(steps=4, learning_rate=0.1, group_size=4), range(9), resume=last)
    assert [m["step"] for m in read_metrics(tmp_path / "m.jsonl")] == [1, 2, 3, 4]


async def test_a_run_can_be_resumed_from_before_its_first_step(tmp_path: Path) -> None:
    """A kill before the first save costs no more than the steps since the start."""
    await run(tmp_path, Recorded(epochs=1), range(3), stopped=True)
    (first,) = list_checkpoints(tmp_path)
    assert (read_checkpoint(first).step, read_checkpoint(first).position) == (0, 0)
    learner = await run(tmp_path, Recorded(epochs=1, val_rewards=[0.5] * 2), range(3), range(3), resume=first)
    assert learner.version == 3
    assert [read_checkpoint(c).step for c in list_checkpoints(tmp_path)] == [0, 3]


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (agl.GRPO(model="calc"), True),
        (agl.GRPO(model="calc", minibatches=2), False),
        (agl.RLOO(model="calc"), False),
        (agl.GSPO(model="calc"), False),
        (agl.GRPO(model="calc", max_staleness=1), False),
    ],
)
def test_a_run_whose_ratios_are_all_one_says_so(algorithm: agl.GRPO, told: bool) -> None:
    assert algorithm.clips_nothing is told


def test_the_learning_rate_warms_up_and_falls() -> None:
    algorithm = agl.GRPO(model="calc", steps=8, learning_rate=1.0, schedule="cosine", warmup_steps=1)
    assert [round(algorithm.rate(done, 0, 1), 3) for done in (0, 2, 4, 8)] == [0.5, 0.854, 0.5, 0.0]
    assert agl.GRPO(model="calc", learning_rate=1.0, warmup_steps=3).rate(1, 0, 1) == 0.5


async def test_nothing_is_sampled_before_the_validation_of_the_model_as_it_came(tmp_path: Path) -> None:
    """A run that is resumed from its beginning, without that validation, samples the same."""
    order: list[str] = []

    class OrderedSource(RecordedSource):
        async def sample(self, step: int, position: int) -> Sampled | None:
            order.append(f"step {step}")
            return await super().sample(step, position)

    class OrderedRun(RecordedRun):
        async def _validation(self, dataset: Any) -> dict[str, float | None]:
            await asyncio.sleep(0.01)
            order.append("validated")
            return {"val_reward": 0.5}

    @dataclass(frozen=True, kw_only=True)
    class Ordered(Recorded):
        def make_run(self, train: Any, val: Any) -> TrainingRun:
            return OrderedRun(self, self.context, train, val, self.make_source)

        def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
            return OrderedSource(self, self.context, schedule, again)

    await run(tmp_path, Ordered(steps=1), range(9), range(3))
    assert order[:2] == ["validated", "step 1"]
