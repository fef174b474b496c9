"""Which tasks a step takes: every task once per epoch, in an order that only the seed and the epoch decide.

The number of tasks taken so far is the whole position in the data, so a resumed run goes on where it stopped.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from agentlightning.errors import ConfigError
from agentlightning.types import Dataset


class TaskSchedule:
    """`per_step` tasks for each step; the last step of an epoch takes what is left."""

    def __init__(self, dataset: Dataset[Any], per_step: int, seed: int) -> None:
        if len(dataset) == 0:
            raise ConfigError("The training data set is empty. Give at least one task to Trainer.fit(agent, tasks).")
        self._dataset = dataset
        self._seed = seed
        self.per_step = min(per_step, len(dataset))

    @property
    def size(self) -> int:
        """Tasks of an epoch."""
        return len(self._dataset)

    def epochs_taken(self, position: int) -> int:
        """Whole epochs among the first `position` tasks."""
        return position // len(self._dataset)

    def take(self, position: int, count: int) -> list[int]:
        """Indices of the tasks that follow the first `position`: `count` of them, or what the epoch has left."""
        epoch, start = divmod(position, len(self._dataset))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))
        return order[start : start + count].tolist()

    def task(self, index: int) -> Any:
        return self._dataset[index]
