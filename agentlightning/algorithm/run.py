"""A training run under way: what is done, what is known of the weights, and the stages of a step.

`GRPO.run` puts the stages in order; settings are in the algorithm, which stays as it was made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from agentlightning.algorithm.asynchronous import AsynchronousSampling, Sampled
from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.checkpoint import (
    CheckpointInfo,
    prune_checkpoints,
    read_checkpoint,
    refuse_other_run,
    save_checkpoint,
)
from agentlightning.algorithm.checkpoint_copy import CheckpointCopy
from agentlightning.algorithm.finished import FinishedRollouts, find_finished
from agentlightning.algorithm.league import Opponents, of_opponents
from agentlightning.algorithm.measures import (
    COLUMNS,
    COLUMNS_OF_EXAMPLES,
    of_examples,
    of_rollouts,
    of_validation,
)
from agentlightning.algorithm.policies import PolicyUpdaters, groups_to_learn_from
from agentlightning.algorithm.preflight import Preflight
from agentlightning.algorithm.replay import ReplayBuffer
from agentlightning.algorithm.sampling import Stopped, run_rollouts
from agentlightning.algorithm.schedule import TaskSchedule
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.source import Source
from agentlightning.algorithm.sync_check import SyncCheck, refuse_unpublished
from agentlightning.algorithm.update import Updater
from agentlightning.backend import POLICY, Backend
from agentlightning.errors import AgentError, ConfigError
from agentlightning.types import Dataset, EnqueueRolloutRequest, RolloutMode
from agentlightning.types.ids import random_hex

CLIPS_NOTHING = (
    "One update per step: all ratios are 1, so clipping plays no part, and losses that differ in it are the same. "
    "minibatches=2 or update_epochs=2 make it count."
)
NOT_COPIED = (
    "The checkpoint of step {step} was not copied to {url}: {problem}. It is in the run's folder, and copying is tried "
    "again with the next one."
)
NOTHING = Sampled((), (), 0, 0.0, 0.0)
"""Before the first step; saved too, so that a run can be resumed from its beginning on."""
OF_ONE_POLICY = (("entropy", "entropy", ".3f"), ("clip_fraction", "clipped", ".1%"))
AT_THE_END = (("left", "left", "s"), ("note", "", "s"))
TAUGHT_NOTHING = "nothing learned: siblings earned the same"


class TrainingRun:
    """An async context manager: sampling that runs ahead ends with the block, and a stop by the user is a good end.

    What was learned since the last checkpoint is saved then, and where the agent gives nothing to learn from any more.
    """

    def __init__(
        self,
        settings: TrainingSettings,
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
        self._val_before = (
            given if (settings.val_every > 0 if settings.val_before is None else settings.val_before) else None
        )
        self._validated: Mapping[str, float | None] = {}
        """What the validation of the last step came to, if it was validated."""
        self._learned: Sampled | None = None
        self._replay = ReplayBuffer(settings.replay_size, settings.replay_priority, settings.seed)
        place = settings.checkpoint_copy
        self._copy = None if place is None else CheckpointCopy(place, settings.keep_checkpoints)
        self._saved = 0
        self._begun = False
        self._ended = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Begin where the checkpoint in the context left the run, or at its start."""
        settings, info = self.settings, await self._restore()
        self._schedule = TaskSchedule(
            self._train,
            settings.tasks_per_step,
            settings.seed,
            settings.weigh,
            info.known_tasks,
            await self._prepare_opponents(info),
        )
        self.done = self._saved = self._began_at = info.step
        self._taken = info.position - len(info.carried)
        await self._prepare_policies(info)
        await self._replay.return_to(self.context.store, info.replay, settings.reward_weights)
        self.preflight = self._make_preflight()
        own = [(f"{name}/reward", name, ".3f") for name in settings.adapters]
        if settings.clips_nothing and settings.chooses("loss", "clip_low", "clip_high"):
            self.context.reporter.note(CLIPS_NOTHING)
        shown = [*COLUMNS, *(own or OF_ONE_POLICY)] if settings.samples else COLUMNS_OF_EXAMPLES
        self.context.reporter.columns([*shown, *AT_THE_END])
        self._finished = await self._find_finished(info)
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
        if self.done == self._began_at:
            self._started = time.time()
        if not self._begun:  # not before the first step is due: a validation comes first
            self._begun = True
            await self._stack.enter_async_context(self._sampling)
        return await self._sampling.next(self.done)

    def check(self, sampled: Sampled) -> None:
        """Raises AgentError where there is nothing to learn from."""
        self.preflight.check([*sampled.episodes, *sampled.dropped])

    async def learn(self, sampled: Sampled) -> dict[str, Any]:
        """Update the weights; the step's metrics."""
        self.context.reporter.status(f"step {self.done + 1}: learning")
        self._began = time.time()
        settings = self.settings
        check_packing, measure_noise = (
            every > 0 and self.done % every == 0
            for every in (settings.check_packing_every, settings.gradient_noise_every)
        )
        rate = settings.rate(self.done, self._taken, self._schedule.size)
        again = self._replay.draw(settings.replay, self.done + 1)
        found = await self._updater.learn(
            [*sampled.episodes, *again],
            rate,
            check_packing=check_packing,
            measure_noise=measure_noise and settings.ranks == 1,
        )
        metrics = {**found, "learning_rate": rate}
        if settings.replay:
            metrics["replayed"] = len(again)
            metrics["replayed_groups"] = list(dict.fromkeys(str(e.rollout.metadata.get("group")) for e in again))
            teaching = groups_to_learn_from(sampled.episodes, settings.credit_rule(), settings.adapters)
            self._replay.add(sampled.episodes, teaching)
        self.done, self._learned = self.done + 1, sampled
        self._finished.weights = random_hex(8)
        self._taken = sampled.position - len(sampled.carried)
        return metrics

    async def publish(self, sampled: Sampled) -> dict[str, float]:
        """Let the engines sample from what was learned, and see on freshly sampled tokens that they do.

        Raises EngineError where a backend publishes nothing, something else, or weights that compute something else.
        """
        gaps: dict[str, float] = {}
        seconds = 0.0
        for alias, updater in self._updaters.items():
            check = self._sync_checks[alias]
            if updater.version == check.version:
                continue  # nothing was learned
            began = time.perf_counter()
            version = await self._backend.publish(alias)
            seconds += time.perf_counter() - began
            refuse_unpublished(alias, version, updater.version)
            gaps[alias] = await check.run(version, sampled.episodes)
        if (opponents := self._schedule.opponents) is not None:
            await opponents.grow(self._backend, next(iter(self._updaters)), self.context.run_dir, self.done)
        self._learning_ended = time.time()
        return {"sync_gap": max(gaps.values()), "publication_seconds": seconds} if gaps else {}

    async def validate(self, sampled: Sampled) -> dict[str, float | None]:
        """How well it does on the validation tasks, every so many steps and after the last."""
        over = self.source.is_over(sampled.position) and not sampled.carried
        self._ended = self.preflight.solved or over or self.done == self.settings.steps
        self._validated = {}
        if self._val is None or not (self._ended or self.done % self.settings.val_every == 0):
            return {}
        self._validated = await self._validation(self._val)
        return {**self._validated}

    async def end_step(self, sampled: Sampled, metrics: Mapping[str, Any]) -> None:
        """Report the step, and save it where that is due."""
        settings = self.settings
        rollouts = (
            of_rollouts(sampled, settings.credit_rule(), settings.adapters)
            if settings.samples
            else of_examples(sampled)
        )
        if (league := settings.plays) is not None:
            rollouts |= of_opponents([*sampled.episodes, *sampled.dropped], league.even)
        summary = {"step": self.done, **rollouts, **metrics, **self._times(sampled), **self._outlook(metrics)}
        self.context.reporter.step({**summary, **await self._time_split()})
        self.preflight.watch(summary)
        if self._ended or self.done % settings.save_every == 0 or self.preflight.stuck:
            await self._save(sampled)

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

    async def _prepare_policies(self, info: CheckpointInfo) -> None:
        settings, reporter = self.settings, self.context.reporter
        aliases = list(settings.adapters) or [POLICY]
        self._updaters: dict[str, Updater] = {}
        self._sync_checks: dict[str, SyncCheck] = {}
        for alias in aliases:
            learner, engine = self._backend.learner(alias), self._backend.engine(alias)
            version = (await engine.info()).version
            self._updaters[alias] = Updater(settings, learner, reporter, version=version)
            self._updaters[alias].load(info.learning.get(alias, {}))
            self._sync_checks[alias] = SyncCheck(engine, learner, settings.logprob_gap_limit, version=version)
        several = bool(settings.adapters)
        self._updater = PolicyUpdaters(self._updaters, reporter) if several else self._updaters[aliases[0]]

    async def _prepare_opponents(self, info: CheckpointInfo) -> Opponents | None:
        settings = self.settings
        if settings.plays is None:
            return None
        opponents = Opponents(settings.plays, settings.frozen or "", settings.seed)
        await opponents.return_to(self._backend, info.league)
        return opponents

    def _make_preflight(self) -> Preflight:
        settings = self.settings
        return Preflight(
            self.context.reporter,
            settings.credit_rule(),
            policies=list(settings.adapters),
            learned=self.done > 0,
            compares=settings.samples
            and not settings.credit_mode.teacher
            and self._schedule.per_step * settings.group_size > 1,
            flat_steps=settings.flat_steps,
            turned_away=self.context.turned_away,
            selected_by=self.context.selected_by,
            objections=self.context.objections,
            settings=vars(settings),
            goes_on=settings.preflight == "warn",
        )

    async def _validation(self, dataset: Dataset[Any]) -> dict[str, float | None]:
        """What the validation tasks were worth, see `measures.of_validation`; no number if the user stopped it."""
        step, settings = self.done, self.settings
        opponents = self._schedule.opponents if settings.plays else None
        against = {} if opponents is None else {"opponent": settings.frozen, "seat": 0, "pool": opponents.pool}
        requests = [
            EnqueueRolloutRequest(
                input=dataset[i],
                mode=RolloutMode.VAL,
                config=settings.rollout_config,
                metadata={"step": step, **against},
            )
            for i in range(len(dataset))
            for _ in range(settings.val_repeats)
        ]
        try:
            words = f"step {step}: validating"
            episodes = await run_rollouts(self.context, requests, words, settings.reward_weights, settings.stall)
        except Stopped:
            return {"val_reward": None}
        return {**of_validation(episodes, settings.val_repeats)}

    async def _restore(self) -> CheckpointInfo:
        """What the checkpoint to go on from says; that of a run that has done nothing if there is none."""
        checkpoint = self.context.resume_from
        if checkpoint is None:
            return self._info()
        info = read_checkpoint(checkpoint)
        refuse_other_run(checkpoint, info, self._info())
        await self._backend.restore(str(checkpoint))
        return info

    async def _find_finished(self, info: CheckpointInfo) -> FinishedRollouts:
        """Rollouts that need not be sampled again; none in a deterministic run, which draws a step as a whole."""
        settings, context = self.settings, self.context
        same = info.weights is not None and info.recipe is not None and info.recipe == context.recipe
        if context.resume_from is None or info.weights is None or not same or settings.deterministic:
            return FinishedRollouts(random_hex(8))
        versions = {alias: check.version for alias, check in self._sync_checks.items()}
        steps = range(info.step + 1, info.step + 2 + settings.max_staleness)
        return await find_finished(context.store, context.run_id, info.weights, versions, steps)

    async def _save(self, sampled: Sampled) -> None:
        info = replace(
            self._info(),
            step=self.done,
            weights=self._finished.weights,
            recipe=self.context.recipe,
            position=sampled.position,
            carried=sampled.carried,
            val_reward=self._validated.get("val_reward"),
            val_low=self._validated.get("val_low"),
            known_tasks=self._schedule.known,
            league=[] if self._schedule.opponents is None else self._schedule.opponents.state,
            replay=self._replay.state,
            learning={alias: updater.state() for alias, updater in self._updaters.items()},
        )
        saved = await save_checkpoint(self.context.run_dir, self._backend, info)
        self.context.reporter.event("checkpoint", {"step": self.done, "path": str(saved)})
        prune_checkpoints(self.context.run_dir, self.settings.keep_checkpoints)
        self._saved = self.done
        if self._copy is not None and (problem := await self._copy.update(self.context.run_dir)) is not None:
            self.context.reporter.warn(NOT_COPIED.format(step=self.done, url=self._copy.url, problem=problem))

    def _info(self) -> CheckpointInfo:
        """What a checkpoint says of the run, whatever its step."""
        settings = self.settings
        return CheckpointInfo(
            step=0,
            base_model=settings.model,
            seed=settings.seed,
            lora_rank=settings.lora_rank,
            policies=list(settings.adapters),
            frozen=settings.frozen,
            tasks=len(self._train),
        )

    def _times(self, sampled: Sampled) -> dict[str, Any]:
        return {
            "sampling_seconds": sampled.ended - sampled.began,
            "learning_seconds": self._learning_ended - self._began,
            "sampling_from": sampled.began,
            "learning_from": self._began,
            "time": time.time(),
        }

    def _outlook(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """How many steps there will be, the seconds left at the pace so far, and what is odd about this one."""
        steps = self.settings.steps_of(self._schedule.size)
        pace = (time.time() - self._started) / (self.done - self._began_at)
        updates = [value for name, value in metrics.items() if name.split("/")[-1] == "updates"]
        odd = {"note": TAUGHT_NOTHING} if updates and not any(updates) else {}
        return {"steps": steps, "seconds_left": round(pace * max(0, steps - self.done), 1), **odd}

    async def _time_split(self) -> dict[str, float]:
        """Seconds since the start that the backend sampled, learned, and had nothing to do; and what was published."""
        stats = await self._backend.stats()
        if stats is None:
            return {}
        return {
            "model_sampling_seconds": stats.sampling_s,
            "model_learning_seconds": stats.learning_s,
            "model_idle_seconds": stats.idle_s,
            "cached_tokens": stats.cached_tokens,
            "prefill_tokens": stats.prefill_tokens,
            **({"published_bytes": stats.published_bytes} if stats.published_bytes else {}),
            **{f"publication_seconds/{name}": seconds for name, seconds in stats.publication_seconds.items()},
        }
