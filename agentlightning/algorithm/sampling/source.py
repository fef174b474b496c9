"""Where a step's rollouts come from: groups of siblings, enqueued, waited for and read back. Slow groups carry over.

Sampling may run ahead of learning, by at most `max_staleness` steps, which stay in order. With `max_staleness` 0 a step
is sampled only when the one before it is learned.

Finished rollouts that an interrupted run had not learned from, or whose learning no checkpoint has, are used where
they are exact: enqueued under the weights of the checkpoint that the run goes on from, under the same recipe, and with
every token of the policies in training sampled by the checkpoint's version of them. All others are sampled anew. Each
is handed out once.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.checkpoint import CheckpointInfo
from agentlightning.algorithm.credit.assignment import groups_to_learn_from
from agentlightning.algorithm.episode import Episode, Sampled, collect
from agentlightning.algorithm.sampling.rollouts import cancel, enqueue, finished_groups
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.store.base import LightningStore
from agentlightning.types import (
    Call,
    EnqueueRolloutRequest,
    Outcome,
    Rollout,
    RolloutMode,
    RolloutRecord,
    RolloutStatus,
)
from agentlightning.types.arrays import np
from agentlightning.types.ids import random_hex
from agentlightning.types.names import ANNOTATION, JUDGED

KEPT = (
    "Step {step}: {count} of {all} rollouts were finished before the run was interrupted, by the very weights that it "
    "goes on from; they are kept."
)


class Source(Protocol):
    """What a training run learns from, step by step."""

    def is_over(self, position: int) -> bool:
        """Whether all epochs are taken after `position` tasks."""
        ...

    async def sample(self, step: int, position: int) -> Sampled | None:
        """The rollouts of step `step` (counted from 1), `position` tasks being taken before; None after the last."""
        ...

    async def close(self) -> None:
        """Give up what is under way."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task, which are compared with each other."""

    task: int
    """Index into the data set."""
    rollout_ids: tuple[str, ...]


class RolloutSource:
    """Samples a group of rollouts per task."""

    def __init__(
        self,
        settings: TrainingSettings,
        context: TrainingContext,
        schedule: TaskSchedule,
        again: Sequence[int] = (),
        finished: FinishedRollouts | None = None,
    ) -> None:
        """`again`: tasks that were taken before the run was interrupted and whose rollouts it did not finish.

        `finished`: rollouts that need not be sampled again.
        """
        self._settings = settings
        self._context = context
        self._schedule = schedule
        self._again = list(again)
        self._known = finished
        self._carried: list[Group] = []

    def is_over(self, position: int) -> bool:
        """Whether all epochs are done; never, if the number of steps is given, which then decides alone."""
        return self._settings.steps is None and self._schedule.epochs_taken(position) >= self._settings.epochs

    async def sample(self, step: int, position: int) -> Sampled | None:
        """A group of finished rollouts per task, siblings side by side; None when the epochs are over.

        With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups that teach nothing make room for fresh tasks;
        what counts there is what was earned, not the punishment of length.
        """
        settings = self._settings
        if settings.steps is not None and step > settings.steps:
            return None  # sampling ahead of the last step would be for nothing
        if self.is_over(position) and not self._carried and not self._again:
            return None
        if settings.deterministic and self._context.backend is not None:
            seed = np.random.SeedSequence([settings.seed, step]).generate_state(1)[0]
            await self._context.backend.reseed(int(seed))
        began, steady = time.time(), time.monotonic()
        tasks: list[int] = []
        kept: list[Episode] = []
        dropped: list[Episode] = []
        for _ in range(1 + settings.dynamic_sampling):
            missing = self._schedule.per_step - len(kept) // settings.group_size - len(self._carried)
            again, self._again = self._again[:missing], self._again[missing:]
            taken = [*tasks, *again, *(group.task for group in self._carried)]
            fresh = [] if self.is_over(position) else self._schedule.take(position, missing - len(again), taken)
            if not again and not fresh and not self._carried:
                break
            position += len(fresh)
            groups = await self._enqueue(again + fresh, step, first_group=len(tasks))
            finished = await self._finished(groups, step, all_of_them=self.is_over(position))
            ids = [i for group in finished for i in group.rollout_ids]
            await self._schedule.finished([group.rollout_ids for group in finished])
            found = await collect(self._context.store, ids, settings.reward_weights)
            tasks += [group.task for group in finished]
            read = {e.rollout.rollout_id: e for e in found}
            self._schedule.sampled([(g.task, [read[i] for i in g.rollout_ids if i in read]) for g in finished])
            if not settings.dynamic_sampling:
                kept = found
                break
            teaching = groups_to_learn_from(found, settings.credit_rule(shaped=False), settings.adapters)
            for e in found:
                (kept if e.rollout.metadata["group"] in teaching else dropped).append(e)
        carried = [*(group.task for group in self._carried), *self._again]
        return Sampled(kept, tasks, position, began, time.monotonic() - steady, carried, dropped)

    async def close(self) -> None:
        await cancel(self._context, [i for group in self._carried for i in group.rollout_ids])

    async def _enqueue(self, tasks: Sequence[int], step: int, first_group: int) -> list[Group]:
        """A group for each task; what is finished already is part of it, and only the rest is enqueued."""
        size = self._settings.group_size
        known = [() if self._known is None else self._known.take(step, task, size) for task in tasks]
        used = {rollout.metadata["group"] for found in known for rollout in found}
        numbers = (n for n in itertools.count(first_group) if f"{step}-{n}" not in used)
        about = [
            found[0].metadata if found else self._metadata(task, step, next(numbers))
            for task, found in zip(tasks, known, strict=True)
        ]
        requests = [
            EnqueueRolloutRequest(
                input=self._schedule.task(task),
                mode=RolloutMode.TRAIN,
                config=self._settings.rollout_config,
                metadata=metadata,
            )
            for task, metadata, found in zip(tasks, about, known, strict=True)
            for _ in range(size - len(found))
        ]
        if count := sum(map(len, known)):
            self._context.reporter.note(KEPT.format(step=step, count=count, all=count + len(requests)))
        new = iter(await enqueue(self._context, requests))
        return [
            Group(task, (*(r.rollout_id for r in found), *itertools.islice(new, size - len(found))))
            for task, found in zip(tasks, known, strict=True)
        ]

    def _metadata(self, task: int, step: int, group: int) -> dict[str, Any]:
        return {
            **{"step": step, "group": f"{step}-{group}", "task": task},
            **({} if self._known is None else {WEIGHTS: self._known.weights}),
            **self._schedule.metadata(task, step, group),
        }

    async def _finished(self, new: Sequence[Group], step: int, *, all_of_them: bool) -> list[Group]:
        """The groups that are finished, carried ones among them, as soon as they are a quorum; the rest is carried."""
        groups = [*self._carried, *new]
        need = len(groups) if all_of_them else math.ceil(self._settings.quorum * len(groups))
        rollouts = [group.rollout_ids for group in groups]
        done = set(await finished_groups(self._context, rollouts, need, f"step {step}: sampling", self._settings.stall))
        self._carried = [group for n, group in enumerate(groups) if n not in done]
        return [group for n, group in enumerate(groups) if n in done]


class AsynchronousSampling:
    """An async context manager: sampling goes on beside the block and ends with it."""

    def __init__(
        self,
        sample: Callable[[int, int], Awaitable[Sampled | None]],
        *,
        done: int,
        position: int,
        max_staleness: int,
    ) -> None:
        """`sample(step, position)` samples step `step` (counted from 1); None: there is none."""
        self._sample = sample
        self._done = done
        self._position = position
        self._max_staleness = max_staleness
        self._learned = asyncio.Event()
        self._ready: asyncio.Queue[Sampled] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._producer = asyncio.create_task(self._produce())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._producer.cancel()
        await asyncio.gather(self._producer, return_exceptions=True)

    async def next(self, done: int) -> Sampled | None:
        """The rollouts of the step after `done` learned ones; None after the last. Raises what sampling raised."""
        self._done = done
        self._learned.set()
        getting = asyncio.create_task(self._ready.get())
        try:
            await asyncio.wait({getting, self._producer}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        self._producer.result()
        return None

    async def _produce(self) -> None:
        step = self._done + 1
        while True:
            while step > self._done + 1 + self._max_staleness:
                self._learned.clear()
                await self._learned.wait()
            sampled = await self._sample(step, self._position)
            if sampled is None:
                return
            self._position = sampled.position
            self._ready.put_nowait(sampled)
            step += 1


WEIGHTS = "weights"
"""The key of a rollout's metadata that says under which weights it was enqueued."""
_ENDED_BY_THEMSELVES = (Outcome.OK, Outcome.TRUNCATED, Outcome.AGENT_ERROR)
"""Outcomes that the death of a process cannot have caused."""


class FinishedRollouts:
    """Finished rollouts of the steps to come, by step and task, in groups of siblings."""

    def __init__(self, weights: str, rollouts: Iterable[Rollout] = ()) -> None:
        """`weights` names the weights that are sampled from now: no other weights, of any course of the run, have the
        name."""
        self.weights = weights
        self._groups: dict[tuple[int, int], dict[str, list[Rollout]]] = {}
        for rollout in rollouts:
            about = rollout.metadata
            siblings = self._groups.setdefault((about["step"], about["task"]), {})
            siblings.setdefault(about["group"], []).append(rollout)

    def take(self, step: int, task: int, most: int) -> Sequence[Rollout]:
        """Finished siblings of one group for the task, at most so many; none where there are none."""
        groups = self._groups.get((step, task))
        return groups.pop(next(iter(groups)))[:most] if groups else ()


async def finished_before(
    context: TrainingContext, settings: TrainingSettings, info: CheckpointInfo, versions: Mapping[str, int]
) -> FinishedRollouts:
    """What a run that goes on from a checkpoint need not sample again; none of it in a deterministic run, which draws
    a step as a whole. `versions`: of the weights that are sampled from, by policy."""
    same = info.weights is not None and info.recipe is not None and info.recipe == context.recipe
    if context.resume_from is None or info.weights is None or not same or settings.deterministic:
        return FinishedRollouts(random_hex(8))
    steps = range(info.step + 1, info.step + 2 + settings.max_staleness)
    return await find_finished(context.store, context.run_id, info.weights, versions, steps)


async def find_finished(
    store: LightningStore, run_id: str | None, weights: str, versions: Mapping[str, int], steps: Sequence[int]
) -> FinishedRollouts:
    """Those of the run that weights of this name sampled for these steps; `versions` are theirs, by policy."""
    if run_id is None:
        return FinishedRollouts(weights)
    ended = [RolloutStatus.SUCCEEDED, RolloutStatus.FAILED]
    found = await store.query_rollouts(
        run_id_in=[run_id], mode_in=[RolloutMode.TRAIN], step_in=list(steps), status_in=ended, limit=-1
    )
    ids = [r.rollout_id for r in found if r.metadata.get(WEIGHTS) == weights and _is_of_a_group(r.metadata)]
    records = await store.query_records(ids) if ids else []
    exact = [r for r in records if _is_exact(r.calls, versions)]
    return FinishedRollouts(weights, [r.rollout for r in exact if await _ended_by_itself(store, r)])


async def _ended_by_itself(store: LightningStore, record: RolloutRecord) -> bool:
    """Whether no death of a process can be why it ended so. What a judge has said of siblings stays said: asking again
    costs again."""
    outcome = record.attempt and record.attempt.outcome
    if outcome is not Outcome.JUDGE_ERROR:
        return outcome in _ENDED_BY_THEMSELVES
    spans_of_parts = await store.query_spans(record.rollout.rollout_id, "latest", name=ANNOTATION)
    return any(JUDGED in span.attributes for span in spans_of_parts)


def _is_of_a_group(metadata: Mapping[str, Any]) -> bool:
    return isinstance(metadata.get("task"), int) and isinstance(metadata.get("group"), str)


def _is_exact(calls: Sequence[Call], versions: Mapping[str, int]) -> bool:
    trained = [call for call in calls if call.info.trained]
    known = all(call.versions for call in trained)
    sampled_by = {(call.info.policy, run.version) for call in trained for run in call.versions}
    return bool(trained) and known and sampled_by <= set(versions.items())
