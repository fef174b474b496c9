"""Which tasks a step takes: every task once per epoch, in an order that only the seed and the epoch decide.

The number of tasks taken so far is the whole position in the data, so a resumed run goes on where it stopped. A part
may choose the tasks instead; an epoch is then as many draws as there are tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.mixture import first_of, source_of
from agentlightning.algorithm.part import RunHooks
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset
from agentlightning.types.arrays import np


class TaskSchedule:
    """`per_step` tasks for each step; the last step of an epoch takes what is left."""

    def __init__(self, dataset: Dataset[Any], per_step: int, seed: int, parts: RunHooks | None = None) -> None:
        """`parts`: those that may choose tasks, add to the metadata of rollouts, and look at what these earned."""
        if len(dataset) == 0:
            raise ConfigError("The training data set is empty. Give at least one task to Trainer.fit(agent, tasks).")
        self._dataset = dataset
        self._seed = seed
        self._parts = parts or RunHooks()
        self.per_step = min(per_step, len(dataset))

    @property
    def size(self) -> int:
        """The number of tasks in an epoch."""
        return len(self._dataset)

    def epochs_taken(self, position: int) -> int:
        """Whole epochs among the first `position` tasks."""
        return position // len(self._dataset)

    def take(self, position: int, count: int, besides: Sequence[int] = ()) -> list[int]:
        """Indices of the tasks that follow the first `position`: `count` of them, or what the epoch has left.

        A part that chooses takes none of `besides`, those that the step has already.
        """
        if (chosen := self._parts.choose(position, count, besides)) is not None:
            return chosen
        epoch, start = divmod(position, len(self._dataset))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))
        return [first_of(self._dataset, index) for index in order[start : start + count].tolist()]

    def task(self, index: int) -> Any:
        return self._dataset[index]

    def metadata(self, index: int, step: int, group: int) -> dict[str, Any]:
        """What the metadata of a group's rollouts says of its task: the data set of a mixture, and what parts add."""
        source = source_of(self._dataset, index)
        return {**({} if source is None else {"source": source}), **self._parts.metadata(step, group)}

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        """Groups of rollouts have finished and are not yet read from the store."""
        await self._parts.finished(groups)

    def sampled(self, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        """Groups have finished: the index of each one's task, and its rollouts."""
        self._parts.sampled(groups)
