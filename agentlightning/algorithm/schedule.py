"""Which tasks a step takes: every task once per epoch, in an order that only the seed and the epoch decide.

So the step's number is the whole position in the data, and a resumed run goes on where it stopped.
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
        self._per_step = min(per_step, len(dataset))
        self._seed = seed

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self._dataset) // self._per_step)

    def tasks(self, step: int) -> list[Any]:
        """The tasks of step `step`, counted from 0."""
        epoch, position = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._dataset))
        chosen = order[position * self._per_step : (position + 1) * self._per_step]
        return [self._dataset[int(i)] for i in chosen]
