"""GRPO: sample a group of rollouts per task, compare siblings, push the policy towards the better ones.

THE LOOP is `GRPO.run`; the whole family (see `family.py`) runs it with other settings. Group Relative Policy
Optimization: Shao et al., arXiv 2402.03300; clip-higher and token mean: DAPO, arXiv 2503.14476.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agentlightning.algorithm.asynchronous import AsynchronousSampling, Sampled
from agentlightning.algorithm.checkpoint import (
    CheckpointInfo,
    prune_checkpoints,
    read_checkpoint,
    refuse_other_run,
    save_checkpoint,
)
from agentlightning.algorithm.episode import Episode, collect, mean_reward
from agentlightning.algorithm.policies import PolicyLearners, PolicyUpdaters, groups_to_learn_from
from agentlightning.algorithm.preflight import Preflight
from agentlightning.algorithm.sampling import Stopped, cancel, enqueue, finished_groups, run_rollouts
from agentlightning.algorithm.schedule import TaskSchedule
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.update import Updater
from agentlightning.algorithm.validation import validate
from agentlightning.errors import AgentError, ConfigError
from agentlightning.types import Dataset, EnqueueRolloutRequest, Outcome, RolloutMode

COLUMNS = (
    ("step", "step", "d"),
    ("reward", "reward", ".3f"),
    ("val_reward", "val", ".3f"),
    ("failed", "failed", "d"),
    ("tokens", "tokens", ",d"),
    ("sampling_seconds", "sample s", ".1f"),
    ("learning_seconds", "learn s", ".1f"),
)
CLIPS_NOTHING = (
    "One update per step: all ratios are 1, so clipping plays no part, and losses that differ in it are the same. "
    "minibatches=2 or update_epochs=2 make it count."
)
ENDED_WELL = (Outcome.OK, Outcome.TRUNCATED)
OF_ONE_POLICY = (("entropy", "entropy", ".3f"), ("clip_fraction", "clipped", ".1%"))

NOTHING = Sampled((), (), 0, 0.0, 0.0)
"""Before the first step; saved too, so that a run can be resumed from its beginning on."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task, which are compared with each other."""

    task: int
    """Index into the data set."""
    rollout_ids: tuple[str, ...]


@dataclass(kw_only=True)
class GRPO(TrainingSettings):
    """A GRPO run. `GRPO(model="calc")` is enough; `TrainingSettings` lists what can be set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        validate(self)

    # ---- the loop --------------------------------------------------------------------------------------------------

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        if train_dataset is None:
            raise ConfigError(f"{type(self).__name__} needs training tasks: Trainer.fit(agent, tasks).")
        self._schedule = TaskSchedule(train_dataset, self.tasks_per_step, self.seed)
        val = val_dataset if val_dataset is not None and len(val_dataset) else None
        reporter, updater = self.context.reporter, self._updater()
        if self.clips_nothing:
            reporter.note(CLIPS_NOTHING)
        done, position = await self._resume()
        self._carried: list[Group] = []
        taken = position - len(self._again)
        preflight = self._preflight(learned=done > 0)
        own = [(f"{name}/reward", name, ".3f") for name in self.policies]
        reporter.columns([*COLUMNS, *(own or OF_ONE_POLICY)])
        learned, saved, val_reward = None, done, None
        try:
            if self.context.resume_from is None:
                if val is not None:
                    val_reward = await self._validate(val, step=0)
                    reporter.step({"step": 0, "val_reward": val_reward, "time": time.time()})
                await self._save(0, NOTHING, None)
            sampling = AsynchronousSampling(
                self._sample, done=done, position=position, max_staleness=self.max_staleness
            )
            async with sampling:
                while (self.steps is None or done < self.steps) and not preflight.solved:
                    self._heed_stop()
                    sampled = await sampling.next(done)
                    if sampled is None:
                        break
                    preflight.check([*sampled.episodes, *sampled.dropped])
                    reporter.status(f"step {done + 1}: learning")
                    began = time.time()
                    certify = self.certify_every > 0 and done % self.certify_every == 0
                    metrics = await updater.learn(sampled.episodes, self._rate(done, taken), certify=certify)
                    ended = time.time()
                    done, learned, taken = done + 1, sampled, sampled.position - len(sampled.carried)
                    over = self._is_over(sampled.position) and not sampled.carried
                    last = done == self.steps or preflight.solved or over
                    val_reward = None
                    if val is not None and (last or done % self.val_every == 0):
                        val_reward = metrics["val_reward"] = await self._validate(val, step=done)
                    summary = {"step": done, **_summary(sampled), **metrics, **_times(sampled, began, ended)}
                    reporter.step({**summary, **await self._time_split()})
                    preflight.watch(summary)
                    if last or done % self.save_every == 0 or preflight.stuck:
                        await self._save(done, sampled, val_reward)
                        saved = done
        except (Stopped, AgentError) as end:
            if learned is not None and saved < done:
                await self._save(done, learned, val_reward)
            if isinstance(end, AgentError):
                raise
        finally:
            await cancel(self.context, [i for group in self._carried for i in group.rollout_ids])

    # ---- its parts -------------------------------------------------------------------------------------------------

    async def _sample(self, step: int, position: int) -> Sampled | None:
        """A group of finished rollouts per task, siblings side by side; None when the epochs are over.

        With dynamic sampling (DAPO, arXiv 2503.14476, section 3.2) groups that teach nothing make room for fresh tasks;
        what counts there is what was earned, not the punishment of length.
        """
        if self.steps is not None and step > self.steps:
            return None  # sampling ahead of the last step would be for nothing
        if self._is_over(position) and not self._carried and not self._again:
            return None
        if self.deterministic:
            await self._learner().reseed(int(np.random.SeedSequence([self.seed, step]).generate_state(1)[0]))
        began = time.time()
        tasks: list[int] = []
        kept: list[Episode] = []
        dropped: list[Episode] = []
        for _ in range(1 + self.dynamic_sampling):
            missing = self._schedule.per_step - len(kept) // self.group_size - len(self._carried)
            again, self._again = self._again[:missing], self._again[missing:]
            fresh = [] if self._is_over(position) else self._schedule.take(position, missing - len(again))
            if not again and not fresh and not self._carried:
                break
            position += len(fresh)
            groups = await self._enqueue(again + fresh, step, first_group=len(tasks))
            finished = await self._finished(groups, step, all_of_them=self._is_over(position))
            found = await collect(self.context.store, [i for group in finished for i in group.rollout_ids])
            tasks += [group.task for group in finished]
            if not self.dynamic_sampling:
                kept = found
                break
            teaching = groups_to_learn_from(found, replace(self.credit_rule(), overlong=None), self.policies)
            for e in found:
                (kept if e.rollout.metadata["group"] in teaching else dropped).append(e)
        carried = [*(group.task for group in self._carried), *self._again]
        return Sampled(kept, tasks, position, began, time.time(), carried, dropped)

    async def _enqueue(self, tasks: Sequence[int], step: int, first_group: int) -> list[Group]:
        requests = [
            EnqueueRolloutRequest(
                input=self._schedule.task(task),
                mode=RolloutMode.TRAIN,
                config=self.rollout_config,
                metadata={"step": step, "group": f"{step}-{group}", "task": task},
            )
            for group, task in enumerate(tasks, first_group)
            for _ in range(self.group_size)
        ]
        ids = await enqueue(self.context, requests)
        size = self.group_size
        return [Group(task, tuple(ids[n * size : (n + 1) * size])) for n, task in enumerate(tasks)]

    async def _finished(self, new: Sequence[Group], step: int, *, all_of_them: bool) -> list[Group]:
        """The groups that are finished, carried ones among them, as soon as they are a quorum; the rest is carried."""
        groups = [*self._carried, *new]
        need = len(groups) if all_of_them else math.ceil(self.quorum * len(groups))
        rollouts = [group.rollout_ids for group in groups]
        done = set(await finished_groups(self.context, rollouts, need, f"step {step}: sampling"))
        self._carried = [group for n, group in enumerate(groups) if n not in done]
        return [group for n, group in enumerate(groups) if n in done]

    async def _validate(self, dataset: Dataset[Any], step: int) -> float | None:
        """Mean reward over the validation tasks; None if the user stopped it.

        A failed rollout counts 0 here, whatever it had earned before: a user would see it fail.
        """
        requests = [
            EnqueueRolloutRequest(
                input=dataset[i], mode=RolloutMode.VAL, config=self.rollout_config, metadata={"step": step}
            )
            for i in range(len(dataset))
        ]
        try:
            episodes = await run_rollouts(self.context, requests, f"step {step}: validating")
        except Stopped:
            return None
        return float(np.mean([(e.reward or 0.0) if e.outcome in ENDED_WELL else 0.0 for e in episodes]))

    def _preflight(self, *, learned: bool) -> Preflight:
        compares = self.samples and self._schedule.per_step * self.group_size > 1
        rule, policies = self.credit_rule(), list(self.policies)
        return Preflight(
            self.context.reporter,
            rule,
            policies=policies,
            learned=learned,
            compares=compares,
            flat_steps=self.flat_steps,
            turned_away=self.context.turned_away,
            selected_by=self.context.selected_by,
        )

    def _is_over(self, position: int) -> bool:
        """Whether all epochs are taken; where the number of steps is given, that alone decides."""
        return self.steps is None and self._schedule.epochs_taken(position) >= self.epochs

    def _heed_stop(self) -> None:
        if self.context.stop.is_set():
            raise Stopped

    def _rate(self, done: int, taken: int) -> float:
        """The learning rate after `done` steps that learned `taken` tasks."""
        if self.schedule == "constant":
            return self.learning_rate
        of_all = done / self.steps if self.steps is not None else taken / (self.epochs * self._schedule.size)
        return self.learning_rate * max(0.0, 1 - of_all)

    async def _resume(self) -> tuple[int, int]:
        """How many steps are done already, and how many tasks they took."""
        self._again: list[int] = []
        if self.context.resume_from is None:
            return 0, 0
        info = read_checkpoint(self.context.resume_from)
        refuse_other_run(self.context.resume_from, info, self._info())
        await self._learner().load_state(str(self.context.resume_from / "optimizer"))
        self._again = list(info.carried)
        return info.step, info.position

    async def _save(self, done: int, sampled: Sampled, val_reward: float | None) -> None:
        info = replace(
            self._info(), step=done, position=sampled.position, carried=sampled.carried, val_reward=val_reward
        )
        await save_checkpoint(self.context.run_dir, self._learner(), info)
        prune_checkpoints(self.context.run_dir, self.keep_checkpoints)

    def _info(self) -> CheckpointInfo:
        """What a checkpoint says of the run, whatever its step."""
        return CheckpointInfo(
            step=0,
            base_model=self.model,
            seed=self.seed,
            lora_rank=self.lora_rank,
            policies=list(self.policies),
            frozen=self.frozen,
            tasks=self._schedule.size,
        )

    async def _time_split(self) -> dict[str, float]:
        """Seconds since the start that the model process sampled, learned, and had nothing to do."""
        if self.context.stats is None:
            return {}
        stats = await self.context.stats()
        return {
            "model_sampling_seconds": stats.sampling_s,
            "model_learning_seconds": stats.learning_s,
            "model_idle_seconds": stats.idle_s,
            "cached_tokens": stats.cached_tokens,
            "prefill_tokens": stats.prefill_tokens,
        }

    def _learner(self) -> Any:
        if self.context.learner is None:
            name = type(self).__name__
            raise ConfigError(f"{name} needs a learner; the trainer starts one from {name}(model=…).")
        return PolicyLearners(self.context.learners) if self.policies else self.context.learner

    def _updater(self) -> Updater | PolicyUpdaters:
        learner, reporter = self._learner(), self.context.reporter
        if not self.policies:
            return Updater(self, learner, reporter)
        updaters = {name: Updater(self, one, reporter) for name, one in self.context.learners.items()}
        return PolicyUpdaters(updaters, reporter)


def _times(sampled: Sampled, began: float, ended: float) -> dict[str, Any]:
    return {
        "sampling_seconds": sampled.ended - sampled.began,
        "learning_seconds": ended - began,
        "sampling_from": sampled.began,
        "learning_from": began,
        "time": time.time(),
    }


def _summary(sampled: Sampled) -> dict[str, Any]:
    """What the step's rollouts were like."""
    episodes = [*sampled.episodes, *sampled.dropped]
    outcomes = Counter(e.outcome.value for e in episodes)
    return {
        "reward": mean_reward(episodes),
        "rollouts": len(episodes),
        "failed": sum(n for o, n in outcomes.items() if o not in ENDED_WELL),
        "outcomes": dict(outcomes),
        "calls": sum(len(e.calls) for e in episodes),
        "tokens": sum(e.sampled_tokens for e in episodes),
        "tasks": list(sampled.tasks),
        **({"dropped": len(sampled.dropped)} if sampled.dropped else {}),
    }
