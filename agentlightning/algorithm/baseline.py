"""Baseline: runs the agent on the tasks and learns nothing. For dry runs and for measuring a model."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from agentlightning.algorithm.base import Algorithm, PolicySpec
from agentlightning.algorithm.episode import Episode, collect, mean_reward
from agentlightning.algorithm.hints import OF_THE_TRAINER
from agentlightning.algorithm.rollout_verdicts import never_called
from agentlightning.algorithm.sampling.rollouts import Stopped, enqueue, finished_groups, sampling_seed
from agentlightning.arguments import GivenByName
from agentlightning.backend import BackendFactory, ModelSpec
from agentlightning.errors import ConfigError, kind_of
from agentlightning.gateway.settings import CallSettings
from agentlightning.runner.frameworks import caches_on
from agentlightning.types import Dataset, EnqueueRolloutRequest, Outcome, RolloutConfig, RolloutMode, RolloutStatus
from agentlightning.types.finding import counted

SHOWN_FAILURES = 3


@dataclass(kw_only=True)
class Baseline(GivenByName, Algorithm):
    """Runs every task `repeats` times; `episodes` holds what came of it, in the order of the tasks."""

    _others = OF_THE_TRAINER

    model: str | None = None
    """The model to serve to the agent; None if the agent brings its own, or gets one from `initial_resources`."""
    policies: Mapping[str, str | None] = field(default_factory=dict)
    """Several policies on `model` by alias: the directory of each one's adapter, or None for `model` as it is."""
    frozen: str | None = None
    """With `policies`: an alias for `model` without an adapter."""
    repeats: int = 1
    """Rollouts of each task."""
    mode: RolloutMode = RolloutMode.VAL
    """What the rollouts count as."""
    max_context: int = 4096
    """Prompt plus response, in tokens."""
    max_concurrency: int = 64
    """Requests that are sampled at the same time."""
    device: str = "auto"
    """As in `TrainingSettings`."""
    dtype: str = "float32"
    """As in `TrainingSettings`."""
    renderer: str | None = None
    """How messages become tokens, where it cannot be found out."""
    backend: str | BackendFactory = "embedded"
    """Where the model is sampled: a name or a callable that makes a backend."""
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)
    """Deadline and retries of each rollout."""
    seed: int | None = None
    """Two measurements with the same seed draw alike for the same task and repeat (common random numbers), so that what
    differs between them is what is compared. None: they draw independently."""

    served: PolicySpec | None = None
    """Serve exactly this, instead of what `model` and the settings around it say."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"repeats is {self.repeats!r}; each task is run at least once.")
        self.episodes: Sequence[Episode] = ()

    @property
    def policy(self) -> PolicySpec | None:
        if self.served is not None or self.model is None:
            return self.served
        model = ModelSpec(
            model=self.model,
            policies=self.policies,
            frozen=self.frozen,
            device=self.device,
            dtype=self.dtype,
            max_context=self.max_context,
            max_concurrency=self.max_concurrency,
        )
        return PolicySpec(model, CallSettings(renderer=self.renderer), self.backend)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        if train_dataset is None or len(train_dataset) == 0:
            raise ConfigError("There are no tasks to run the agent on: give fit(agent, tasks).")
        requests = [
            EnqueueRolloutRequest(
                input=train_dataset[i],
                mode=self.mode,
                config=self.rollout_config,
                metadata=sampling_seed(self.seed, i, repeat),
            )
            for i in range(len(train_dataset))
            for repeat in range(self.repeats)
        ]
        with suppress(Stopped):
            ids = await enqueue(self.context, requests)
            try:
                await finished_groups(self.context, [ids], 1, "running")
            finally:  # a run that is stopped says what it had come to
                found = await collect(self.context.store, ids)
                self.episodes = [e for e in found if e.rollout.status is not RolloutStatus.CANCELLED]
        if self.episodes:
            self._report()

    def _report(self) -> None:
        """Say what came of it, and why the first failures failed."""
        reporter = self.context.reporter
        reporter.note(summary(self.episodes, counts=self.policy is not None))
        failed: dict[tuple[str, str], list[tuple[str, Episode]]] = {}
        for e in self.episodes:
            if not e.good:
                error = (e.attempt and e.attempt.error) or "It was never run."
                failed.setdefault((e.outcome.value, kind_of(error)), []).append((error, e))
        for (outcome, _), same in itertools.islice(failed.items(), SHOWN_FAILURES):
            error, first = same[0]
            reporter.warn(f"{len(same)} × {outcome}, first on {first.rollout.input!r:.200}\n{error}")
        was_called = any(e.calls for e in self.episodes) or self.context.refused_requests
        ended = was_called or any(e.outcome is not Outcome.AGENT_ERROR for e in self.episodes)
        if self.policy is not None and ended and not any(e.calls for e in self.episodes):
            reporter.warn(str(never_called(self.episodes, self.context.refused_requests, caches_on())))


def summary(episodes: Sequence[Episode], *, counts: bool = True) -> str:
    """One line: how many, what they earned, what they used (where our own engine counts it), and how they ended."""
    reward = mean_reward(episodes)
    calls = [call for e in episodes for call in e.calls]
    used = [
        counted(len(calls), "model call"),
        counted(sum(len(call.response_ids) for call in calls), "sampled token"),
    ]
    return ", ".join(
        [
            counted(len(episodes), "rollout"),
            "no reward" if reward is None else f"mean reward {reward:.3f}",
            *(used if counts else ()),
            *(f"{count} {outcome}" for outcome, count in Counter(e.outcome.value for e in episodes).items()),
        ]
    )


def dry_run_of(algorithm: Algorithm | None) -> Baseline:
    """What runs the agent once on each task, on the model that the algorithm would train, and learns nothing."""
    served = algorithm.policy if isinstance(algorithm, Algorithm) else None
    if served is not None:
        served = replace(served, model=replace(served.model, reference=None, critic=False))
    config = getattr(algorithm, "rollout_config", None)
    return Baseline(served=served, rollout_config=config if isinstance(config, RolloutConfig) else RolloutConfig())
