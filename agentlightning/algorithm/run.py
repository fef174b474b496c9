"""A training run under way: what is done, what is known of the weights, and the stages of a step.

`GRPO.run` puts the stages in order; settings are in the algorithm. What features do is in their parts
(`features.PARTS`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.checkpoint import info_of, prune_checkpoints, restore, save_checkpoint
from agentlightning.algorithm.episode import Sampled
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.hooks import PartsOfRun
from agentlightning.algorithm.measures import Progress, columns_of, of_step, time_split
from agentlightning.algorithm.part import RunScope
from agentlightning.algorithm.sampling.rollouts import Stopped, run_validation
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import AsynchronousSampling, FinishedRollouts, Source, finished_before
from agentlightning.algorithm.update import PolicyUpdaters, Publisher, Updater
from agentlightning.backend import POLICY, Backend, drain_of
from agentlightning.errors import AgentError, BackendDied, ConfigError
from agentlightning.types import Dataset
from agentlightning.types.ids import random_hex

NOTHING = Sampled((), (), 0, 0.0, 0.0)
"""Before the first step; saved too, so that a run can be resumed from its beginning on."""


class TrainingRun:
    """An async context manager: sampling that runs ahead ends with the block, and a stop by the user is a good end.

    What was learned since the last checkpoint is saved then, and where the agent gives nothing to learn from any more.
    """

    def __init__(
        self,
        settings: FeatureSettings,
        context: TrainingContext,
        train: Dataset[Any],
        val: Dataset[Any] | None,
        make_source: Callable[[TaskSchedule, Sequence[int], FinishedRollouts], Source],
    ) -> None:
        """`make_source` says where rollouts come from: for the tasks in their order, and those of them that an
        interrupted run had not finished, with the rollouts that it had."""
        self.settings = settings
        self._make_source = make_source
        self.context = context
        self.done = 0
        """Steps that are learned."""
        self._taken = 0
        """Tasks that these learned."""
        self._train = train
        given = val if val is not None and len(val) else None
        self._val = given if settings.val_every else None
        self._val_before = given if settings.validates_before else None
        self._validated: Mapping[str, float | None] = {}
        """What the validation of the last step came to, if it was validated."""
        self._learned: Sampled | None = None
        self._saved = 0
        self._begun = self._ended = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Begin where the checkpoint in the context left the run, or at its start."""
        settings, context = self.settings, self.context
        info = await restore(context, self._backend, info_of(settings, len(self._train)))
        aliases = list(settings.adapters) or [POLICY]
        self._parts = PartsOfRun(
            settings.features, RunScope(settings, context, self._train, self._backend, aliases, info.step)
        )
        await self._parts.load(info.parts)
        self._schedule = TaskSchedule(self._train, settings.tasks_per_step, settings.seed, self._parts)
        self.done, self._saved, self._taken = info.step, info.step, info.position - len(info.carried)
        versions = {alias: (await self._backend.engine(alias).info()).version for alias in aliases}
        self._publication = Publisher(self._backend, versions)
        self._updaters = {
            alias: Updater(settings, self._backend.learner(alias), context.reporter, version=version)
            for alias, version in versions.items()
        }
        for alias, updater in self._updaters.items():
            await updater.parts.load(info.learning.get(alias, {}))
        several = bool(settings.adapters)
        self._updater = PolicyUpdaters(self._updaters, context.reporter) if several else self._updaters[POLICY]
        context.reporter.columns(columns_of(settings))
        self._finished = await finished_before(context, settings, info, versions)
        self._progress = Progress(settings, self._schedule.size, self.done, info.position)
        self.source = self._make_source(self._schedule, info.carried, self._finished)
        self._stack.push_async_callback(self.source.close)
        self._sampling = AsynchronousSampling(
            self.source.sample, done=info.step, position=info.position, max_staleness=settings.max_staleness
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        async with self._stack:
            if isinstance(error, Stopped | AgentError) and self._learned is not None and self._saved < self.done:
                await self._save(self._learned)
        return isinstance(error, Stopped)

    # ---- the stages of a step --------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the last step is done. Raises Stopped when the user wants to stop."""
        if self.context.stop.is_set():
            raise Stopped
        return self._ended or self.done == self.settings.steps

    async def validate_before(self) -> float | None:
        """Validate and save the model as it came, before the first step of a run; the validation reward, if it did."""
        if self.context.resume_from is not None:
            return None
        found = await self._validation(self._val_before) if self._val_before is not None else {}
        if found:
            self.context.reporter.step({"step": 0, **found, "time": time.time()})
        await self._save(NOTHING)
        return found.get("val_reward")

    async def sampled(self) -> Sampled | None:
        """The rollouts of the next step; None when there is none."""
        self._progress.begin()
        if not self._begun:  # not before the first step is due: a validation comes first
            self._begun = True
            await self._stack.enter_async_context(self._sampling)
        return await self._sampling.next(self.done)

    def check(self, sampled: Sampled) -> None:
        """Raises AgentError where there is nothing to learn from."""
        self._parts.check(sampled)

    async def learn(self, sampled: Sampled) -> dict[str, Any]:
        """Update the weights; the step's metrics."""
        self.context.reporter.status(f"step {self.done + 1}: learning")
        self._progress.begin_learning()
        rate = self.settings.rate(self.done, self._taken, self._schedule.size)
        again = self._parts.again(self.done + 1)
        metrics = await self._updater.learn([*sampled.episodes, *again], rate, self.done)
        metrics = {**metrics, "learning_rate": rate, **self._parts.learned(sampled, again)}
        self.done, self._learned, self._taken = self.done + 1, sampled, sampled.position - len(sampled.carried)
        self._finished.weights = random_hex(8)
        return metrics

    async def publish(self, sampled: Sampled) -> dict[str, Any]:
        """Let the engines sample from what was learned, and see on fresh tokens that they do. Raises EngineError where
        a backend publishes nothing, something else, or weights that compute something else."""
        versions = await self._publication.publish({alias: u.version for alias, u in self._updaters.items()})
        metrics = await self._parts.published(self.done, versions, sampled.episodes)
        self._progress.end_learning()
        return {"publication_seconds": self._publication.seconds, **metrics} if versions else metrics

    async def validate(self, sampled: Sampled) -> dict[str, float | None]:
        """How well it does on the validation tasks, every so many steps and after the last."""
        over = self.source.is_over(sampled.position) and not sampled.carried
        self._ended = self._parts.ends_run or over or self.done == self.settings.steps
        self._validated = {}
        if self._val is None or not (self._ended or self.done % self.settings.val_every == 0):
            return {}
        self._validated = await self._validation(self._val)
        return {**self._validated}

    async def end_step(self, sampled: Sampled, metrics: Mapping[str, Any]) -> None:
        """Report the step, and save it where that is due. Raises BackendDied where the learner then leaves machines."""
        measures = {**of_step(sampled, self.settings), **self._parts.measure(sampled), **metrics}
        summary = {"step": self.done, **measures, **self._progress.of_step(self.done, sampled, metrics)}
        self.context.reporter.step({**summary, **await time_split(self._backend)})
        self._parts.after_step(summary)
        drain = drain_of(self._backend)
        if self._ended or drain or self.done % self.settings.save_every == 0 or self._parts.needs_checkpoint:
            await self._save(sampled)
        if drain is not None and drain.can_move and not self._ended:
            raise BackendDied(drain.message)

    async def end_early(self) -> float | None:
        """Validate where others go on behind a step, and save what was learned; the validation reward."""
        self._validated = await self._validation(self._val) if self._val is not None else {}
        if self._learned is not None and self._saved < self.done:
            await self._save(self._learned)
        return self._validated.get("val_reward")

    # ---- their parts -----------------------------------------------------------------------------------------------

    @property
    def _backend(self) -> Backend:
        if self.context.backend is None:
            name = type(self.settings).__name__
            raise ConfigError(f"{name} needs a backend; the trainer starts one from {name}(model=…).")
        return self.context.backend

    async def _validation(self, dataset: Dataset[Any]) -> dict[str, float | None]:
        """What the validation tasks were worth; no number if the user stopped it."""
        metadata = {"step": self.done, **self._parts.validation_metadata()}
        return await run_validation(self.context, self.settings, dataset, metadata)

    async def _save(self, sampled: Sampled) -> None:
        info = replace(
            info_of(self.settings, len(self._train)),
            step=self.done,
            weights=self._finished.weights,
            recipe=self.context.recipe,
            position=sampled.position,
            carried=sampled.carried,
            val_reward=self._validated.get("val_reward"),
            val_low=self._validated.get("val_low"),
            parts=self._parts.state(),
            learning={alias: updater.parts.state() for alias, updater in self._updaters.items()},
        )
        saved = await save_checkpoint(self.context.run_dir, self._backend, info)
        self.context.reporter.event("checkpoint", {"step": self.done, "path": str(saved)})
        prune_checkpoints(self.context.run_dir, self.settings.keep_checkpoints)
        self._saved = self.done
        await self._parts.saved(self.context.run_dir, self.done)
