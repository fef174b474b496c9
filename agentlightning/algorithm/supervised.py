"""Supervised algorithms in the same loop: SFT on the best rollouts, a run's or chats, DPO on the best and the worst.

Good rollouts that another run recorded are learned as they were sampled (`RecordedSource`), or exported.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
from pydantic import PositiveFloat

from agentlightning.algorithm.episode import Episode, Sampled, collect, made_call
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.schedule import TaskSchedule
from agentlightning.algorithm.settings import Advantage, Loss
from agentlightning.algorithm.source import FinishedRollouts, Source
from agentlightning.algorithm.units import Normalization
from agentlightning.errors import AgentLightningError, ConfigError, missing_extra
from agentlightning.learner.base import LossConfig
from agentlightning.models import resolve_model
from agentlightning.store import SqliteLightningStore
from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, Dataset, Outcome, Rollout, RolloutMode, RolloutStatus, Run
from agentlightning.types.arrays import Int32Array, np

MEASURED_CHATS = 1_000
"""Conversations whose length is looked at before the first step …"""
MOST_CHECKED = 100_000
"""… and those whose form is, before anything is loaded."""
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
"""Who speaks in a conversation."""
NO_CHAT = "It must be a chat: {'messages': [{'role': …, 'content': …}, …], 'tools': […]}, tools where there are any."


@dataclass(frozen=True, kw_only=True)
class DPO(GRPO):
    """Direct preference optimisation on the best and the worst sibling of each group (arXiv 2305.18290).

    The reference is the model that the run started from.
    """

    loss: Loss = "dpo"
    advantage: Advantage = "best_and_worst"
    normalization: Normalization = "rollout"
    dpo_beta: PositiveFloat = 0.1
    """How far the policy may move from the reference: smaller is farther."""

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
        what = "Chats" if self.source == "chats" else "Recorded rollouts"
        if self.source == "chats":
            if self.policies:
                raise ConfigError("Chats do not say which of several policies they are for; train them one by one.")
            if self.best_of != 1 or self.min_reward is not None:
                raise ConfigError("best_of and min_reward choose among a run's rollouts; chats have no rewards.")
        if self.max_staleness or self.quorum < 1:
            raise ConfigError(f"{what} are not sampled, so max_staleness and quorum have no effect. Leave them out.")
        check_good(self._good)

    @property
    def _good(self) -> Good:
        return Good(best_of=self.best_of, min_reward=self.min_reward)

    @property
    def examples(self) -> str | None:
        return {"rollouts": None, "chats": "conversations", "run": "recorded tasks"}.get(self.source, "examples")

    def check_data(self, train: Dataset[Any]) -> None:
        if self.source == "chats":
            check_chats(train)

    def make_source(self, schedule: TaskSchedule, again: Sequence[int], finished: FinishedRollouts) -> Source:
        rollouts = super().make_source(schedule, again, finished)
        if self.from_run is not None:
            return RecordedSource(Path(self.from_run), self.model, self._good, schedule, rollouts)
        return rollouts if self.samples else ChatSource(self, schedule, rollouts)


class ChatSource:
    """The next chats of the data set, as rollouts."""

    def __init__(self, settings: SFT, schedule: TaskSchedule, rollouts: Source) -> None:
        self._settings = settings
        self._schedule = schedule
        self._rollouts = rollouts
        self._rendering: Any = None

    def is_over(self, position: int) -> bool:
        return self._rollouts.is_over(position)

    async def sample(self, step: int, position: int) -> Sampled | None:
        if self.is_over(position):
            return None
        if self._rendering is None and (words := self._too_long()):
            self._settings.context.reporter.warn(words)
        began = time.time()
        chosen = self._schedule.take(position, self._schedule.per_step)
        episodes = [chat_episode(self._chats, self._schedule.task(i), f"{step}-{i}") for i in chosen]
        return Sampled(episodes, chosen, position + len(chosen), began, time.time())

    async def close(self) -> None:
        await self._rollouts.close()

    def _too_long(self) -> str | None:
        """How many conversations do not fit the context in which agents are sampled, and by how much; None: all fit."""
        shape, most = self._settings.shape, self._settings.max_context
        limit = min(most, (shape and shape.max_context) or most)
        chats = [self._schedule.task(i) for i in range(min(self._schedule.size, MEASURED_CHATS))]
        lengths = [length_of(self._chats, chat) for chat in chats]
        longer = [length for length in lengths if length > limit]
        if not longer:
            return None
        return (
            f"{len(longer)} of {len(chats)} conversations are longer than the context of {limit} tokens, the longest "
            f"by {max(longer) - limit}. They are learned whole, which takes memory, and an agent cannot get so far: "
            f"shorten them, or {'raise max_context' if limit == most else 'take a model with a longer context'}."
        )

    @property
    def _chats(self) -> Any:
        """How this model writes chats; loaded once."""
        if self._rendering is None:
            try:
                from agentlightning.rendering import load_rendering
            except ModuleNotFoundError as error:
                raise missing_extra("torch", error.name or "renderers") from error
            self._rendering = load_rendering(resolve_model(self._settings.model), self._settings.renderer)
        return self._rendering


def check_chats(chats: Dataset[Any]) -> None:
    """Raises ConfigError for the first that is no conversation to learn, with its number."""
    for number in range(min(len(chats), MOST_CHECKED)):
        try:
            _messages_of(chats[number])
        except ConfigError as error:
            raise ConfigError(f"Of the conversations, number {number + 1} (counted from 1): {error}") from None


def length_of(rendering: Any, chat: Any) -> int:
    """Tokens of a conversation; 0 for one that cannot be written, which is said when it is learned."""
    messages, tools = _messages_of(chat)
    try:
        return len(rendering.render(messages, tools))
    except AgentLightningError:
        return 0


def _messages_of(chat: Any) -> tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]:
    """A conversation's messages and tools. Raises ConfigError for what is none, and where nothing is to be learned."""
    messages, tools = (chat.get("messages"), chat.get("tools")) if isinstance(chat, Mapping) else (chat, None)
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise ConfigError(f"{NO_CHAT} {_from_other_forms(chat)}It is {str(chat)[:200]}")
    if not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise ConfigError(f"{NO_CHAT} Its messages are {str(messages)[:200]}")
    if unknown := sorted({str(m["role"]) for m in messages} - ROLES):
        raise ConfigError(f"A chat has the roles {', '.join(sorted(ROLES))}, and this one has {', '.join(unknown)}.")
    if not any(m["role"] == "assistant" for m in messages):
        raise ConfigError(f"A chat without an assistant message has nothing to learn: {str(messages)[:200]}")
    return messages, tools


def _from_other_forms(row: Any) -> str:
    """What to write for a row of a form that other trainers read; nothing for other rows."""
    if not isinstance(row, Mapping):
        return ""
    if "conversations" in row:
        return (
            "This is ShareGPT's form: write messages, with the roles user for human and assistant for gpt, and content "
            "for value. "
        )
    pairs = (("prompt", "completion"), ("instruction", "output"), ("question", "answer"), ("prompt", "response"))
    asked, said = next((pair for pair in pairs if {*pair} <= {*row}), ("", ""))
    if not asked:
        return ""
    return (
        f"Write its {asked} and its {said} as messages: [{{'role': 'user', 'content': row[{asked!r}]}}, "
        f"{{'role': 'assistant', 'content': row[{said!r}]}}]. "
    )


def chat_episode(rendering: Any, chat: Any, name: str) -> Episode:
    """A chat as a rollout with reward 1: every assistant message is a call whose response is to be learned."""
    messages, tools = _messages_of(chat)
    calls = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, response = render_answer(rendering, messages[: i + 1], tools)
            nothing = np.zeros(len(response), dtype=np.float32)
            calls.append(made_call(f"{name}-{i}", name, "chat", prompt, response, nothing))
    attempt = Attempt(rollout_id=name, attempt_id="chat", sequence_id=1, start_time=0.0, outcome=Outcome.OK)
    return Episode(Rollout(rollout_id=name, input=None, start_time=0.0, metadata={"group": name}), attempt, 1.0, calls)


def render_answer(
    rendering: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
) -> tuple[Int32Array, Int32Array]:
    """The prompt before the last message, and the tokens with which the model should say it, its end included.

    An answer is taken as it stands before a user's next message, where formats leave an empty reasoning away. Many
    leave out any reasoning there, so one that reasons is taken as it stands at the end.

    Raises ConfigError where the chat format does not write an answer right behind its prompt.
    """
    prompt = rendering.render(messages[:-1], tools)
    last = _answer(rendering, prompt, rendering.render(messages, tools))
    if last is None or not rendering.parse(last, prompt, tools).reasoning:
        user = {"role": "user", "content": "."}
        before_user = _answer(rendering, prompt, rendering.render([*messages, user], tools))
        last = last if before_user is None else before_user
    if last is None:
        raise ConfigError(
            f"The chat format '{rendering.name}' writes an answer otherwise than where the model would begin it, so "
            f"this message cannot be learned: {str(messages[-1])[:200]}"
        )
    return prompt, last


def _answer(rendering: Any, prompt: Int32Array, whole: Int32Array) -> Int32Array | None:
    """What follows the prompt up to the first end of a turn; None if it does not."""
    answer = whole[len(prompt) :]
    ends = np.flatnonzero(np.isin(answer, list(rendering.stop_token_ids)))
    if not np.array_equal(whole[: len(prompt)], prompt) or not len(ends):
        return None
    return answer[: ends[0] + 1].astype(np.int32)


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
    """The good rollouts of a run (None: of a store that knows no runs), in the order in which they began."""
    found = [e async for e in _rewarded(store, run_id, [good.mode or RolloutMode.TRAIN], good.min_reward)]
    if not found and good.mode is None:
        found = [e async for e in _rewarded(store, run_id, None, good.min_reward)]
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


async def _rewarded(
    store: LightningStore, run_id: str | None, modes: list[RolloutMode] | None, least: float | None
) -> AsyncIterator[Episode]:
    offset, last = 0, False
    while not last:
        page = await store.query_rollouts(
            status_in=[RolloutStatus.SUCCEEDED],
            mode_in=modes,
            run_id_in=None if run_id is None else [run_id],
            reward_min=least,
            sort_by="start_time",
            limit=PAGE,
            offset=offset,
        )
        for episode in await collect(store, [r.rollout_id for r in page]):
            if episode.good and episode.reward is not None:
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
        began = time.time()
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
        return Sampled(episodes, tasks, position, began, time.time()) if episodes else None

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
