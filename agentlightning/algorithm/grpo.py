"""GRPO: sample a group of rollouts per task, compare siblings, push the policy towards the better ones.

THE LOOP is `GRPO.run`; the whole family (see `family.py`) runs it with other settings. Group Relative Policy
Optimization: Shao et al., arXiv 2402.03300; clip-higher and token mean: DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.run import TrainingRun
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import FinishedRollouts, RolloutSource, Source
from agentlightning.algorithm.validation import validate
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset


@dataclass(frozen=True, kw_only=True)
class GRPO(FeatureSettings):
    """Group Relative Policy Optimization: learns from how the rollouts of one task differ in what they earned.

        agl.Trainer(algorithm=agl.GRPO(model="calc")).fit(agent, tasks, val_dataset=held_out)

    `model` alone is enough. What is set most often: `steps`; `tasks_per_step` × `group_size`, the rollouts of a step;
    `learning_rate`, whose default suits the model's size; `max_context`, prompt plus response in tokens; `lora_rank` to
    train an adapter instead of all weights. `FeatureSettings` has them all. A setting that does not exist, or
    that would have no effect, is a ConfigError.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(self)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """The loop. What it works on is in `TrainingRun`; the same by hand, in one flat file: `examples/own_loop`."""
        if train_dataset is None:
            raise ConfigError(f"{type(self).__name__} needs training tasks: Trainer.fit(agent, tasks).")
        # Sampling may go on beside the block, and ends with it; a stop by the user saves what was learned.
        async with self.make_run(train_dataset, val_dataset) as run:
            await run.validate_before()
            while not run.is_over:
                sampled = await run.sampled()  # finished rollouts, a group of siblings per task, read from the store
                if sampled is None:
                    break
                run.check(sampled)  # is there anything to learn from?
                learned = await run.learn(sampled)  # advantages, token trees, gradients, optimiser steps
                published = await run.publish(sampled)  # the engine samples from the new weights; checked
                validated = await run.validate(sampled)  # where it is due
                await run.end_step(sampled, {**learned, **published, **validated})  # report, save

    def make_run(self, train: Dataset[Any], val: Dataset[Any] | None) -> TrainingRun:
        """Makes the run that the training loop works on."""
        return TrainingRun(self, self.context, train, val, self.make_source)

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        """Where the run's rollouts come from.

        `again` are tasks that an interrupted run had not finished, `finished` are rollouts that it had.
        """
        return RolloutSource(self, self.context, schedule, again, finished)
