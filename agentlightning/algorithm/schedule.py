"""Which tasks a step takes: every task once per epoch, in an order that only the seed and the epoch decide.

The number of tasks taken so far is the whole position in the data, so a resumed run goes on where it stopped. With a
curriculum tasks are drawn by what is known of them instead, and an epoch is as many draws as there are tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.algorithm.curriculum import TaskHistory, Weigh
from agentlightning.algorithm.league import Opponents
from agentlightning.algorithm.mixture import Mixture
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset
from agentlightning.types.arrays import np


class TaskSchedule:
    """`per_step` tasks for each step; the last step of an epoch takes what is left."""

    def __init__(
        self,
        dataset: Dataset[Any],
        per_step: int,
        seed: int,
        curriculum: Weigh | None = None,
        known: Mapping[str, Sequence[float]] | None = None,
        opponents: Opponents | None = None,
    ) -> None:
        """`known`: of a resumed run, the `known` of the schedule before. `opponents`: whom groups play."""
        if len(dataset) == 0:
            raise ConfigError("The training data set is empty. Give at least one task to Trainer.fit(agent, tasks).")
        self._dataset = dataset
        self._seed = seed
        self._history = (
            None
            if curriculum is None
            else TaskHistory(curriculum, len(dataset), known, first=self._first, source=self.source)
        )
        self.opponents = opponents
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

        A curriculum draws none of `besides`, those that the step has already.
        """
        if self._history is not None:
            return self._history.draw(count, np.random.default_rng([self._seed, position]), besides)
        epoch, start = divmod(position, len(self._dataset))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))
        return [self._first(index) for index in order[start : start + count].tolist()]

    def _first(self, index: int) -> int:
        """The index that stands for a task, of those that a mixture has it at: what is known of it is known once."""
        return self._dataset.first(index) if isinstance(self._dataset, Mixture) else index

    def task(self, index: int) -> Any:
        return self._dataset[index]

    def source(self, index: int) -> str | None:
        """The data set that a task of a mixture is from."""
        return self._dataset.source(index) if isinstance(self._dataset, Mixture) else None

    def record(self, index: int, rewards: Sequence[float]) -> None:
        """Tell what a group of the task's rollouts has earned; it plays a part where there is a curriculum."""
        if self._history is not None:
            self._history.record(index, rewards)

    @property
    def known(self) -> Mapping[str, Sequence[float]]:
        """The curriculum's history of each task, to be saved in a checkpoint."""
        return {} if self._history is None else self._history.state
