"""What environments share that the model itself plays: it reads what there is to see, and its answer is the action."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from agentlightning.emitter import emit_annotation
from agentlightning.errors import AgentError, ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.litagent.program import first_llm
from agentlightning.types import AttemptedRollout, NamedResources

_TRIES = 3
"""Answers in a row without an action, after which an episode ends."""
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
Message = dict[str, Any]


class ActionResult(NamedTuple):
    """What an action led to."""

    seen: str
    """What there is to see now."""
    reward: float
    over: bool
    taken: bool = True
    """False where it was no action that the environment takes: `seen` says why, and the model may try again."""


class PlayedEpisode(ABC):
    """One episode under way."""

    instructions: str
    """What the model is told first."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions that the model calls to act, in the form of chat completions; without them its words are the action."""

    @abstractmethod
    async def begin(self) -> str:
        """Begin; what there is to see."""

    @abstractmethod
    async def act(self, answer: str) -> ActionResult:
        """Act as an answer says."""

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ActionResult:
        """Act by calling one of the tools."""
        raise NotImplementedError(f"{type(self).__name__} has no tool {name}.")


class Player(LitAgent[Any]):
    """Lets the model act until the episode ends; the reward is the sum of the rewards."""

    def __init__(
        self,
        name: str,
        open_episode: Callable[[int], AbstractAsyncContextManager[PlayedEpisode]],
        *,
        remembers: bool = True,
        answer_tokens: int | None = None,
        max_steps: int | None = None,
    ) -> None:
        """
        Args:
            name: The environment's, such as gym:Taxi-v4.
            open_episode: Opens the episode of a seed.
            remembers: Whether the model sees the episode so far, or the newest observation alone.
            answer_tokens: So many tokens an answer may have; what the run's settings say if not given.
            max_steps: After so many answers with an action an episode ends with what it has earned.
        """
        super().__init__()
        self._name = name
        self._open = open_episode
        self._remembers = remembers
        self._max_steps = max_steps
        self._call = {} if answer_tokens is None else {"max_tokens": answer_tokens}

    @property
    def origin(self) -> tuple[str, str | None]:
        return self._name, None

    def check_task(self, task: Any) -> None:
        if not isinstance(task, Mapping) or not isinstance(task.get("seed"), int):
            raise ConfigError(f'A task of {self._name} is {{"seed": number}}, and not {task!r}.')

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> float:
        llm = first_llm(resources)
        if llm is None:
            raise AgentError("The rollout's resources have no model to play with.")
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none") as client:

            async def ask(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Any:
                given = {"tools": list(tools)} if tools else {}
                create: Any = client.chat.completions.create
                answer = await create(model=llm.model, messages=list(messages), **given, **self._call)
                return answer.choices[0].message

            async with self._open(task["seed"]) as episode:
                return await self._play(episode, ask)

    async def _play(self, episode: PlayedEpisode, ask: Any) -> float:
        system: Message = {"role": "system", "content": episode.instructions}
        messages: list[Message] = [system, _user(await episode.begin())]
        total, steps, missed, over = 0.0, 0, 0, False
        while not over and missed < _TRIES and steps != self._max_steps:
            message = await ask(messages, episode.tools)
            calls = message.tool_calls or []
            turns = [await _called(episode, call) for call in calls] if calls else []
            if not turns:
                if episode.tools and steps:
                    break  # it has said what it had to say
                turns = [await episode.act(message.content or "")]
            for turn in turns:
                total, over = total + turn.reward, over or turn.over
            taken = any(turn.taken for turn in turns)
            missed, steps = (0, steps + 1) if taken else (missed + 1, steps)
            added = [message.model_dump(exclude_none=True), *_results(calls, turns)]
            keeps = self._remembers or not taken or bool(calls)
            messages = [*messages, *added] if keeps else [system, _user(turns[-1].seen)]
        emit_annotation({"episode": {"steps": steps, "without_action": missed == _TRIES}})
        return total


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _results(calls: Sequence[Any], turns: Sequence[ActionResult]) -> list[Message]:
    """The description of its actions that the model gets."""
    if not calls:
        return [_user(turn.seen) for turn in turns]
    return [
        {"role": "tool", "tool_call_id": call.id, "content": turn.seen} for call, turn in zip(calls, turns, strict=True)
    ]


async def _called(episode: PlayedEpisode, call: Any) -> ActionResult:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return ActionResult(f"The arguments are not JSON: {error}", 0.0, over=False, taken=False)
    if not isinstance(arguments, dict):
        return ActionResult("The arguments are no object.", 0.0, over=False, taken=False)
    return await episode.call(call.function.name, arguments)


def last_number(answer: str) -> str | None:
    """The last number that an answer names, as it is written."""
    found = _NUMBER.findall(answer)
    return found[-1] if found and len(found[-1]) < 20 else None


def seeds_of(scheme: str, tasks: int, val_tasks: int, first_seed: int) -> tuple[range, range]:
    """The seeds of training and of validation. Raises ConfigError for other values than numbers."""
    for option, value, least in (("tasks", tasks, 1), ("val_tasks", val_tasks, 0), ("first_seed", first_seed, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"{scheme}: {option} is {value!r}; it is a whole number from {least} on.")
    end = first_seed + tasks
    return range(first_seed, end), range(end, end + val_tasks)
