"""Where a step's rollouts come from: groups of siblings, enqueued, waited for and read back. Slow groups carry over."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.algorithm.asynchronous import Sampled
from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.finished import WEIGHTS, FinishedRollouts
from agentlightning.algorithm.policies import groups_to_learn_from
from agentlightning.algorithm.sampling import cancel, enqueue, finished_groups
from agentlightning.algorithm.schedule import TaskSchedule
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.types import EnqueueRolloutRequest, RolloutMode
from agentlightning.types.arrays import np

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
        began = time.time()
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
        return Sampled(kept, tasks, position, began, time.time(), carried, dropped)

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
