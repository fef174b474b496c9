"""Which finished rollouts an interrupted run keeps: those that are exact, each once; new siblings fill their groups."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import WEIGHTS, FinishedRollouts, RolloutSource, find_finished
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptStatus, EnqueueRolloutRequest, Outcome, RolloutMode, RolloutStatus, Span
from agentlightning.types.names import ANNOTATION, JUDGED
from tests.store.builders import make_call, make_segment

from .test_quorum import SIBLINGS, Slow, sampling, settings

STEP, VERSION = 3, 5
MASKED = "masked"
"""A judge error that the judge of a group has said: it is not asked again."""
ENDINGS = [
    *(Outcome.OK, None, Outcome.TRUNCATED, Outcome.AGENT_ERROR, Outcome.INFRA_ERROR, Outcome.TIMEOUT),
    *(Outcome.JUDGE_ERROR, MASKED),
]

CHOICES: dict[str, list[Any]] = {
    "weights": ["w", "w", "w", "v", None],
    "step": [STEP, STEP, STEP, STEP - 1, STEP + 1],
    "mode": [RolloutMode.TRAIN, RolloutMode.TRAIN, RolloutMode.VAL],
    "run": ["run-1", "run-1", "run-2"],
    "versions": [[VERSION], [VERSION, VERSION], [], [VERSION - 1], [VERSION, VERSION + 1]],
    "outcome": ENDINGS,
    "task": [0, 1, 2],
}


def drawn(count: int, seed: int) -> list[dict[str, Any]]:
    """Exact ones, each with one thing changed, and others at random."""
    exact = {name: choices[0] for name, choices in CHOICES.items()}
    changed = [{**exact, name: choice} for name, choices in CHOICES.items() for choice in choices]
    rng = random.Random(seed)
    return [*changed, *({name: rng.choice(choices) for name, choices in CHOICES.items()} for _ in range(count))]


async def put(store: InMemoryLightningStore, number: int, about: dict[str, Any]) -> str:
    metadata = {"step": about["step"], "group": f"{about['step']}-{about['task']}", "task": about["task"]}
    if about["weights"]:
        metadata[WEIGHTS] = about["weights"]
    request = EnqueueRolloutRequest(input=number, mode=about["mode"], metadata=metadata, run_id=about["run"])
    (rollout,) = await store.enqueue_many_rollouts([request])
    claimed = await store.dequeue_rollout("worker", run_id=about["run"])
    assert claimed is not None
    for n, version in enumerate(about["versions"]):
        prompt, response = f"{number}/{n}/p", f"{number}/{n}/r"
        segments = make_segment(prompt, None, 0, [1, 2]), make_segment(response, prompt, 2, [3], version)
        await store.add_calls([make_call(claimed, f"{number}/{n}", prompt, response, *segments)])
    where: Any = {"rollout_id": rollout.rollout_id, "attempt_id": claimed.attempt.attempt_id}
    outcome = Outcome.JUDGE_ERROR if about["outcome"] == MASKED else about["outcome"]
    if outcome is not None:
        good = outcome in (Outcome.OK, Outcome.TRUNCATED)
        status = AttemptStatus.SUCCEEDED if good else AttemptStatus.FAILED
        await store.update_attempt(**where, status=status, outcome=outcome)
    if about["outcome"] == MASKED:
        await store.add_span(Span.from_attributes(name=ANNOTATION, attributes={JUDGED: 0.5}, **where))
    return rollout.rollout_id


def is_exact(about: dict[str, Any]) -> bool:
    return (
        (about["weights"], about["mode"], about["run"]) == ("w", RolloutMode.TRAIN, "run-1")
        and about["step"] == STEP
        and set(about["versions"]) == {VERSION}
        and about["outcome"] in (Outcome.OK, Outcome.TRUNCATED, Outcome.AGENT_ERROR, MASKED)
    )


async def test_those_are_kept_that_the_very_weights_sampled_and_each_once() -> None:
    rollouts = drawn(60, seed=0)
    store = InMemoryLightningStore()
    try:
        ids = [await put(store, number, about) for number, about in enumerate(rollouts)]
        found = await find_finished(store, "run-1", "w", {"policy": VERSION}, [STEP])
        kept = [r.rollout_id for task in range(3) for r in found.take(STEP, task, 100)]
        exact = [i for i, about in zip(ids, rollouts, strict=True) if is_exact(about)]
        assert Counter(kept) == Counter(exact)
        assert 10 < len(exact) < len(ids) / 2
        assert not any(found.take(STEP, task, 100) for task in range(3))
    finally:
        await store.close()


@pytest.mark.parametrize("again", [[], [7, 9]])
async def test_groups_are_filled_up_and_whole(tmp_path: Path, again: list[int]) -> None:
    """Of each task none or some siblings are there; also where tasks of an earlier step are sampled again first."""
    async with sampling(tmp_path, Slow(set()), settings(), again) as source:
        store = source._context.store
        tasks = TaskSchedule(range(12), 4, seed=0).take(0, 4)
        done = [
            rollout
            for number, task in enumerate(tasks[:3])
            for rollout in await store.enqueue_many_rollouts(
                [
                    EnqueueRolloutRequest(
                        input=task,
                        mode=RolloutMode.TRAIN,
                        metadata={"step": 1, "group": f"1-{number}", "task": task, WEIGHTS: "w"},
                    )
                ]
                * number
            )
        ]
        await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in done], timeout=10)
        context, schedule = source._context, TaskSchedule(range(12), 4, seed=0)
        algorithm = agl.GRPO(model="calc", group_size=SIBLINGS, tasks_per_step=4)
        resumed = RolloutSource(algorithm, context, schedule, again, FinishedRollouts("w", done))
        sampled = await resumed.sample(1, 0)
        assert sampled is not None
        groups = Counter(e.rollout.metadata["group"] for e in sampled.episodes)
        assert list(groups.values()) == [SIBLINGS] * 4
        assert {e.rollout.input for e in sampled.episodes} == {*again, *tasks[: 4 - len(again)]} == set(sampled.tasks)
        used = {e.rollout.rollout_id for e in sampled.episodes}
        assert used >= {r.rollout_id for r in done if r.input in sampled.tasks}
        total = await store.query_rollouts(limit=-1, status_in=[RolloutStatus.SUCCEEDED])
        assert len(used) == 4 * SIBLINGS
        assert len(total) == len(used | {r.rollout_id for r in done}), "nothing is sampled beside"
