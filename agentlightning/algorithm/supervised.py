"""Supervised algorithms in the same loop: SFT on the best rollouts, a run's or chats, DPO on the best and the worst, or
on preferences.

Good rollouts that another run recorded are learned as they were sampled (`RecordedSource`), or exported.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import PositiveFloat

from agentlightning.algorithm.credit.units import Normalization
from agentlightning.algorithm.episode import Episode, Sampled, collect
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.sampling.examples import (
    ExampleSource,
    chat_episodes,
    check_examples,
    is_answered,
    messages_of,
    pair_episodes,
    pair_of,
    refuse_sampling,
)
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import FinishedRollouts, Source
from agentlightning.algorithm.settings import Advantage, Loss
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig
from agentlightning.models import resolve_model
from agentlightning.store import SqliteLightningStore
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, RolloutMode, RolloutStatus, Run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DPO(GRPO):
    """Direct preference optimisation on the best and the worst sibling of each group (arXiv 2305.18290).

    With `source="pairs"` the training data are preferences, `{"input": {"messages": [...], "tools": [...]},
    "preferred_output": [...], "non_preferred_output": [...]}`, nothing is sampled, and the agent validates only. The
    reference is the model that the run started from.
    """

    loss: Loss = "dpo"
    advantage: Advantage = "best_and_worst"
    normalization: Normalization = "rollout"
    dpo_beta: PositiveFloat = 0.1
    """How far the policy may move from the reference: smaller is farther."""
    source: Literal["rollouts", "pairs"] = "rollouts"
    """The source of the training data."""

    def __post_init__(self) -> None:
        if not self.samples:
            refuse_sampling(self, "Preferences", group_size=2)
            self._derive(group_size=2)
        super().__post_init__()

    @property
    def examples(self) -> str | None:
        return "preferences" if self.source == "pairs" else None

    def check_data(self, train: Dataset[Any]) -> None:
        if not self.samples:
            check_examples(train, pair_of, "preferences")

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        rollouts = super().make_source(schedule, again, finished)
        return rollouts if self.samples else ExampleSource(self, pair_episodes, schedule, rollouts)

    def loss_config(self) -> LossConfig:
        return msgspec.structs.replace(super().loss_config(), dpo_beta=self.dpo_beta)


@dataclass(frozen=True, kw_only=True)
class SFT(GRPO):
    """Fine-tuning on what is right: the best rollouts of each group (rejection sampling), those of a run, or chats.

    With `from_run` the training data are tasks of another run, and what is learned are its good rollouts of them, token
    by token as they were sampled. With `source="chats"` the training data are chats, `{"messages": [...], "tools":
    [...]}` or a list of messages, and every assistant message is learned. With both the agent validates only.
    """

    loss: Loss = "reinforce"
    advantage: Advantage = "best"
    max_kl: PositiveFloat | None = None
    """How far one update may move the policy, in nats per token; None: as far as the examples move it."""
    source: Literal["rollouts", "chats", "run"] = "rollouts"
    """The source of the training data; `from_run` implies "run"."""
    from_run: str | Path | None = None
    """A finished run's folder, or the file of its store."""
    best_of: int = 1
    """With `from_run`: how many of each task's best rollouts are learned."""
    min_reward: float | None = None
    """With `from_run`: the lowest reward that is learned; None: any."""

    def __post_init__(self) -> None:
        if (self.from_run is None) == (self.source == "run"):
            if self.source == "chats" or self.from_run is None:
                raise ConfigError("source='run' and from_run='runs/…' go together; chats have no run.")
            self._derive(source="run")
        if not self.samples:
            self._check_given()
            self._derive(advantage="all", group_size=1)
        elif self.best_of != 1 or self.min_reward is not None:
            raise ConfigError("best_of and min_reward choose among the rollouts of from_run, which is not given.")
        super().__post_init__()

    def _check_given(self) -> None:
        if self.source == "chats" and (self.best_of != 1 or self.min_reward is not None):
            raise ConfigError("best_of and min_reward choose among a run's rollouts; chats have no rewards.")
        refuse_sampling(self, "Chats" if self.source == "chats" else "Recorded rollouts", advantage="all", group_size=1)
        check_good(self._good)

    @property
    def _good(self) -> Good:
        return Good(best_of=self.best_of, min_reward=self.min_reward)

    @property
    def examples(self) -> str | None:
        return {"rollouts": None, "chats": "conversations", "run": "recorded tasks"}.get(self.source, "examples")

    def check_data(self, train: Dataset[Any]) -> None:
        if self.source == "chats":
            check_examples(train, messages_of, "conversations")
        elif self.from_run is not None:
            _store_of(Path(self.from_run))
        elif self.samples and len(train) and is_answered(train[0]):
            logger.warning(
                "The tasks are conversations with answers, and SFT learns an agent's own good rollouts of them. "
                "To learn the conversations themselves: SFT(source='chats')."
            )

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        rollouts = super().make_source(schedule, again, finished)
        if self.from_run is not None:
            return RecordedSource(Path(self.from_run), self.model, self._good, schedule, rollouts)
        return rollouts if self.samples else ExampleSource(self, chat_episodes, schedule, rollouts)


PAGE = 200
STORE_FILE = "store.db"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, kw_only=True)
class Good:
    """Which rollouts of a run are good: they ended well and earned enough."""

    min_reward: float | None = None
    best_of: int | None = None
    """How many of a task's best rollouts are taken, earlier ones first among equals; None: all."""
    mode: RolloutMode | None = None
    """Which rollouts are taken, by mode. None: training rollouts, or all if there are none."""


async def good_rollouts(store: LightningStore, run_id: str | None, good: Good) -> list[Episode]:
    """The good rollouts of a run, in the order in which they began. Of a store that knows no runs (None), as that of a
    gateway, those without a reward too, unless rewards choose among them.
    """
    found = [e async for e in _ended_well(store, run_id, [good.mode or RolloutMode.TRAIN], good)]
    if not found and good.mode is None:
        found = [e async for e in _ended_well(store, run_id, None, good)]
    if good.best_of is None:
        return found
    kept: set[str] = set()
    for of_task in by_task(found).values():
        best = sorted(of_task, key=lambda e: e.reward or 0.0, reverse=True)[: good.best_of]
        kept |= {e.rollout.rollout_id for e in best}
    return [e for e in found if e.rollout.rollout_id in kept]


def by_task(episodes: Sequence[Episode]) -> dict[str, list[Episode]]:
    """Groups rollouts by their task, compared as JSON."""
    found: dict[str, list[Episode]] = {}
    for episode in episodes:
        found.setdefault(task_key(episode.rollout.input), []).append(episode)
    return found


def task_key(task: Any) -> str:
    """Equal tasks have equal keys."""
    return json.dumps(task, sort_keys=True, default=repr)


async def _ended_well(
    store: LightningStore, run_id: str | None, modes: list[RolloutMode] | None, good: Good
) -> AsyncIterator[Episode]:
    unrewarded = run_id is None and good.min_reward is None and good.best_of is None
    offset, last = 0, False
    while not last:
        page = await store.query_rollouts(
            status_in=[RolloutStatus.SUCCEEDED],
            mode_in=modes,
            run_id_in=None if run_id is None else [run_id],
            reward_min=good.min_reward,
            sort_by="start_time",
            limit=PAGE,
            offset=offset,
        )
        for episode in await collect(store, [r.rollout_id for r in page]):
            if episode.good and (unrewarded or episode.reward is not None):
                yield episode
        offset, last = offset + PAGE, len(page) < PAGE


class RecordedSource:
    """A step learns the good rollouts of so many tasks, on the tokens that were sampled; tasks without any are passed.

    Nothing is sampled to train; `rollouts` says when the epochs are over.
    """

    def __init__(self, run: Path, model: str, good: Good, schedule: TaskSchedule, rollouts: Source) -> None:
        self._run = run
        self._model = model
        self._good = good
        self._schedule = schedule
        self._rollouts = rollouts
        self._recorded: dict[str, list[Episode]] | None = None

    def is_over(self, position: int) -> bool:
        return self._rollouts.is_over(position)

    async def sample(self, step: int, position: int) -> Sampled | None:
        began, steady = time.time(), time.monotonic()
        recorded = await self._load()
        tasks: list[int] = []
        while len(tasks) < self._schedule.per_step and not self.is_over(position):
            chosen = self._schedule.take(position, self._schedule.per_step - len(tasks))
            position += len(chosen)
            tasks += [i for i in chosen if task_key(self._schedule.task(i)) in recorded]
        episodes = [
            _as_of(step, number, episode)
            for number, index in enumerate(tasks)
            for episode in recorded[task_key(self._schedule.task(index))]
        ]
        return Sampled(episodes, tasks, position, began, time.monotonic() - steady) if episodes else None

    async def close(self) -> None:
        await self._rollouts.close()

    async def _load(self) -> dict[str, list[Episode]]:
        if self._recorded is None:
            self._recorded = by_task(await read_good(self._run, self._model, self._good))
            tasks = {task_key(self._schedule.task(i)) for i in range(self._schedule.size)}
            if not tasks & self._recorded.keys():
                least = "anything" if self._good.min_reward is None else f"at least {self._good.min_reward:g}"
                raise ConfigError(
                    f"None of the training tasks has a rollout in {self._run} that earned {least}. Train on tasks that "
                    "the run had (agl train --config RUN/run.json takes them), or lower min_reward."
                )
        return self._recorded


async def read_good(run: Path, model: str, good: Good) -> list[Episode]:
    """The good rollouts of the last run in a folder, or in a store's file, with calls of `model`'s tokens.

    Raises ConfigError where there is no store, or where its tokens are another model's.
    """
    store = SqliteLightningStore(_store_of(run))
    try:
        runs = await store.query_runs(sort_by="start_time", sort_order="desc", limit=1)
        _refuse_other_tokens(runs[0] if runs else None, model)
        return await good_rollouts(store, runs[0].run_id if runs else None, good)
    finally:
        await store.close()


def _store_of(run: Path) -> Path:
    file = run / STORE_FILE if run.is_dir() else run
    if not file.is_file():
        raise ConfigError(f"There is no store '{file}'. from_run is a run's folder, or the file of a store.")
    return file


def _refuse_other_tokens(run: Run | None, model: str) -> None:
    recorded = run.settings.get("model") if run is not None else None
    if recorded is None or recorded == model:
        return
    files = [Path(resolve_model(name)) / TOKENIZER for name in (recorded, model)]
    if not all(f.is_file() for f in files) or files[0].read_bytes() != files[1].read_bytes():
        raise ConfigError(
            f"The rollouts were sampled from {recorded}, whose tokens are not known to be those of {model}. Write them "
            "as text (agl export RUN --jsonl FILE) and learn that: SFT(source='chats')."
        )


def _as_of(step: int, number: int, episode: Episode) -> Episode:
    """As a rollout of this step, whose tokens are of no version of this run's weights."""
    metadata = {**episode.rollout.metadata, "step": step, "group": f"{step}-{number}"}
    rollout = episode.rollout.model_copy(update={"metadata": metadata})
    return replace(episode, rollout=rollout, calls=[replace(c, versions=()) for c in episode.calls])


def check_good(good: Good) -> None:
    """Raises ConfigError for what chooses nothing."""
    if good.best_of is not None and good.best_of < 1:
        raise ConfigError(f"best_of is {good.best_of}; it is how many rollouts of a task are learned, at least 1.")
    if good.min_reward is not None and not math.isfinite(good.min_reward):
        raise ConfigError(f"min_reward is {good.min_reward}; it must be a finite number.")
