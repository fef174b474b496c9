"""Examples that are learned as they stand, without sampling: chats, and preferences between two answers to one.

An assistant message whose `weight` is 0 is context alone. An answer is learned from the tokens that the model's own
chat format writes for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentlightning.algorithm.episode import Episode, Sampled, made_call
from agentlightning.algorithm.records import settings_of, value_of, written
from agentlightning.algorithm.sampling.schedule import TaskSchedule
from agentlightning.algorithm.sampling.source import Source
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import AgentLightningError, ConfigError, ModelError, missing_extra
from agentlightning.models import resolve_model
from agentlightning.types import Attempt, Dataset, Outcome, Rollout
from agentlightning.types.arrays import Int32Array, np

MEASURED = 1_000
"""Examples whose length is looked at before the first step …"""
MOST_CHECKED = 100_000
"""… and those whose form is, before anything is loaded."""
_MOST_NAMED = 30
"""So many examples that are refused are named by their number."""
ROLES = frozenset(("system", "developer", "user", "assistant", "tool", "function"))
"""Who speaks in a conversation."""
NO_CHAT = "It must be a chat: {'messages': [{'role': …, 'content': …}, …], 'tools': […]}, tools where there are any."
NO_PAIR = (
    "It must be a preference: {'input': {'messages': […]}, 'preferred_output': [message, …], 'non_preferred_output': "
    "[message, …]}."
)
_OUTPUT_ROLES = frozenset(("assistant", "tool"))

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Any] | None


class ExampleSource:
    """The next examples of the data set, as rollouts."""

    def __init__(
        self,
        settings: TrainingSettings,
        episodes_of: Callable[[Any, Any, str], list[Episode]],
        schedule: TaskSchedule,
        rollouts: Source,
    ) -> None:
        """`episodes_of` makes the rollouts of an example: from a rendering, the example, and a name for it."""
        self._settings = settings
        self._episodes_of = episodes_of
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
        began, steady = time.time(), time.monotonic()
        chosen = self._schedule.take(position, self._schedule.per_step)
        made = [self._made(i, f"{step}-{i}") for i in chosen]
        episodes = [episode for some in made for episode in some]
        return Sampled(episodes, chosen, position + len(chosen), began, time.monotonic() - steady)

    async def close(self) -> None:
        await self._rollouts.close()

    def _made(self, number: int, name: str) -> list[Episode]:
        """The rollouts of an example. Raises ConfigError with its number for one that the chat format does not take."""
        try:
            return self._episodes_of(self._chats, self._schedule.task(number), name)
        except ModelError as error:
            raise ConfigError(
                f"Of the {self._settings.examples}, number {number + 1} (counted from 1): {error}"
            ) from error

    def _too_long(self) -> str | None:
        """How many examples do not fit the context in which agents are sampled, and by how much; None: all fit."""
        shape, most = self._settings.shape, self._settings.max_context
        limit = min(most, (shape and shape.max_context) or most)
        examples = [self._schedule.task(i) for i in range(min(self._schedule.size, MEASURED))]
        lengths = [self._length(example) for example in examples]
        longer = [length for length in lengths if length > limit]
        if not longer:
            return None
        too_many = f"{len(longer)} of {len(examples)} {self._settings.examples} are longer"
        advice = "raise max_context" if limit == most else "take a model with a longer context"
        return (
            f"{too_many} than the context of {limit} tokens, the longest by {max(longer) - limit}. They are learned "
            f"whole, which takes memory, and an agent cannot get so far: shorten them, or {advice}."
        )

    def _length(self, example: Any) -> int:
        """Tokens of an example's longest call; 0 if it cannot be written, which is reported when it is learned."""
        try:
            calls = [call for episode in self._episodes_of(self._chats, example, "") for call in episode.calls]
        except AgentLightningError:
            return 0
        return max((len(call.prompt_ids) + len(call.response_ids) for call in calls), default=0)

    @property
    def _chats(self) -> Any:
        """How this model writes chats; loaded once."""
        if self._rendering is None:
            self._rendering = rendering_of(self._settings)
        return self._rendering


def rendering_of(settings: TrainingSettings) -> Any:
    """How the model in training writes chats. Raises ConfigError where its packages are not installed."""
    try:
        from agentlightning.rendering import load_rendering
    except ModuleNotFoundError as error:
        raise missing_extra("torch", error.name or "renderers") from error
    return load_rendering(resolve_model(settings.model), settings.renderer)


def refuse_sampling(settings: TrainingSettings, what: str, **derived: Any) -> None:
    """Raises ConfigError for settings of sampling and of several policies, which have no effect on examples. `derived`:
    those that follow from the examples, and may stand so in the settings of a run that is repeated."""
    if settings.policies and what != "Recorded rollouts":
        raise ConfigError(f"{what} do not say which of several policies they are for; train them one by one.")
    known = settings_of(type(settings))
    for name in _OF_SAMPLING:
        value = value_of(settings, name)
        if value not in (known[name].default, derived.get(name, known[name].default)):
            given = f"{written(settings, name)}={value!r}"
            raise ConfigError(f"{what} are not sampled, so {given} has no effect. Leave it out.")


_OF_SAMPLING = (
    *("group_size", "advantage", "dynamic_sampling", "league", "max_staleness", "quorum"),
    *("temperature", "top_p", "top_k", "min_p", "overlong_tokens"),
)
"""Settings of training rollouts and of how those of a task are compared."""


def check_examples(examples: Dataset[Any], read: Callable[[Any], object], what: str) -> None:
    """Raises ConfigError for the first that `read` refuses, with its number and those of all others."""
    refused: list[int] = []
    first = ""
    for number in range(min(len(examples), MOST_CHECKED)):
        try:
            read(examples[number])
        except ConfigError as error:
            refused.append(number + 1)
            first = first or str(error)
    if not refused:
        return
    also = ", ".join(map(str, refused[1:_MOST_NAMED])) + (" …" if len(refused) > _MOST_NAMED else "")
    others = f" Of the {len(examples)}, {len(refused)} are refused; the others are {also}." if also else ""
    raise ConfigError(f"Of the {what}, number {refused[0]} (counted from 1): {first}{others}")


def messages_of(chat: Any) -> tuple[Messages, Tools]:
    """A conversation's messages and tools. Raises ConfigError for what is none, and where nothing is to be learned."""
    messages, tools = _conversation(chat)
    learned = [m for m in messages if _is_learned(m)]
    if messages and learned and messages[0] is learned[0]:
        raise ConfigError(
            "This chat begins with the assistant, and an answer is learned from what stands before it. Put the user's "
            f"message in front, or give the first one the weight 0, as context: {str(messages)[:200]}"
        )
    if not learned:
        raise ConfigError(
            "A chat without an assistant message has nothing to learn: write what is to be said as one with the role "
            f"'assistant', or leave the chat out: {str(messages)[:200]}"
        )
    if not any(m.get("content") or any(map(m.get, _INSTEAD_OF_CONTENT)) for m in learned):
        raise ConfigError(f"The assistant says nothing in this chat, so nothing is to learn: {str(messages)[:200]}")
    return messages, tools


def is_answered(task: Any) -> bool:
    """Whether it is a conversation that ends with the assistant's answer."""
    messages = task.get("messages") if _is_record(task) else None
    last = messages[-1] if isinstance(messages, list) and messages else {}
    return _is_record(last) and last.get("role") == "assistant"


def pair_of(example: Any) -> tuple[Messages, Tools, Messages, Messages]:
    """The messages and tools of a preference's input, the preferred answer and the other one. Raises ConfigError for
    what is none."""
    outputs = [example.get(f"{kind}_output") for kind in ("preferred", "non_preferred")] if _is_record(example) else []
    if not all(isinstance(one, Sequence) and not isinstance(one, str) for one in outputs) or not outputs:
        raise ConfigError(f"{NO_PAIR} {_instead_of_a_pair(example)}It is {str(example)[:200]}")
    messages, tools = _conversation(example.get("input"))
    for output in outputs:
        _conversation(output)
        if {m["role"] for m in output} - _OUTPUT_ROLES or not any(_is_learned(m) for m in output):
            raise ConfigError(
                f"An answer to compare has messages of the assistant, with those of tools between them: {output!s:.200}"
            )
    if outputs[0] == outputs[1]:
        raise ConfigError(f"Both answers are the same, so none is better. Leave the example out: {outputs[0]!s:.200}")
    return messages, tools, *outputs


def _conversation(chat: Any) -> tuple[Messages, Tools]:
    messages, tools = (chat.get("messages"), chat.get("tools")) if isinstance(chat, Mapping) else (chat, None)
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        if isinstance(messages, str) and messages.lstrip().startswith("[{"):
            raise ConfigError(
                f"Its messages are a text with JSON in it: write json.loads(…) of it. It is {chat!s:.200}"
            )
        raise ConfigError(f"{NO_CHAT} {_from_other_forms(chat)}It is {str(chat)[:200]}")
    if not all(isinstance(m, Mapping) and "role" in m for m in messages):
        form = _SHAREGPT if _is_sharegpt(messages) else ""
        raise ConfigError(f"{NO_CHAT} {form}Its messages are {str(messages)[:200]}")
    if unknown := sorted({str(m["role"]) for m in messages} - ROLES):
        meant = "".join(
            f" Write {_ROLES_MEANT[one.lower()]} for {one}." for one in unknown if one.lower() in _ROLES_MEANT
        )
        raise ConfigError(
            f"A chat has the roles {', '.join(sorted(ROLES))}, and this one has {', '.join(unknown)}.{meant}"
        )
    for message in messages:
        if message.get("weight", 1) not in (0, 1):
            raise ConfigError(f"A message's weight is 0 (context) or 1 (learned), not {message['weight']!r}.")
        content = message.get("content")
        if isinstance(content, int | float) or (content is None and not any(map(message.get, _INSTEAD_OF_CONTENT))):
            raise ConfigError(
                f"The content of a message is {content!r} and not a text: {message!s:.200}. Write what was said, or "
                "leave the message out."
            )
    return messages, tools


_ROLES_MEANT = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter", "customer", "person"), "user"),
    **dict.fromkeys(("gpt", "bot", "ai", "model", "chatbot", "chatgpt", "agent", "llm"), "assistant"),
    **dict.fromkeys(("tool_result", "tool_response", "observation", "function_response"), "tool"),
}
"""What others call the roles of a chat."""
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning")
"""What an assistant's message may have instead of a text."""


def _is_record(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_learned(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and message.get("weight", 1) != 0


_SHAREGPT = (
    "This is ShareGPT's form: write messages, with the roles user for human and assistant for gpt, and content for "
    "value. "
)


_CHOSEN = (
    "Write its prompt as the input's messages, [{'role': 'user', 'content': row['prompt']}], what was chosen as "
    "preferred_output, [{'role': 'assistant', 'content': row['chosen']}], and what was rejected so as "
    "non_preferred_output. "
)


def _is_chosen(row: Any) -> bool:
    """Whether it is a preference as trl's trainers read it."""
    return _is_record(row) and {"chosen", "rejected"} <= {*row}


def _instead_of_a_pair(row: Any) -> str:
    """What to do with a row that is no preference; nothing for one of an unknown form."""
    if _is_chosen(row):
        return _CHOSEN
    for pair in (("chosen", "rejected"), ("preferred_output", "non_preferred_output")):
        lacks = [name for name in pair if _is_record(row) and name not in row]
        if len(lacks) == 1:
            return f"It lacks {lacks[0]}: two answers are compared. "
    one_answer = _is_record(row) and ("messages" in row or _from_other_forms(row))
    return "It has one answer, which --algorithm SFT learns; a preference has a worse one, too. " if one_answer else ""


def _is_sharegpt(messages: Sequence[Any]) -> bool:
    return all(isinstance(m, Mapping) and {"from", "value"} <= {*m} for m in messages)


def _from_other_forms(row: Any) -> str:
    """What to write for a row of a form that other trainers read; nothing for other rows."""
    if not isinstance(row, Mapping):
        return ""
    if "conversations" in row:
        return _SHAREGPT
    if _is_chosen(row) or "preferred_output" in row:
        return "It has an answer and a worse one, which agl.DPO(source='pairs') learns, or --algorithm DPO. "
    if "text" in row:
        return "Write its text as messages: what was asked as the user's, and what is learned as the assistant's. "
    pairs = (("prompt", "completion"), ("instruction", "output"), ("question", "answer"), ("prompt", "response"))
    question, reply = next((pair for pair in pairs if {*pair} <= {*row}), ("", ""))
    if not question:
        return ""
    return (
        f"Write its {question} and its {reply} as messages: [{{'role': 'user', 'content': row[{question!r}]}}, "
        f"{{'role': 'assistant', 'content': row[{reply!r}]}}]. "
    )


def chat_episodes(rendering: Any, chat: Any, name: str) -> list[Episode]:
    """A chat as the one rollout that it is."""
    return [chat_episode(rendering, chat, name)]


def chat_episode(rendering: Any, chat: Any, name: str) -> Episode:
    """A chat as a rollout with reward 1: every assistant message is a call whose response is to be learned, unless its
    weight is 0."""
    messages, tools = messages_of(chat)
    return _episode(rendering, messages, tools, 0, name, name, 1.0)


def pair_episodes(rendering: Any, example: Any, name: str) -> list[Episode]:
    """A preference as two rollouts of one group, with the rewards 1 and 0."""
    messages, tools, preferred, other = pair_of(example)
    outputs = ((preferred, 1.0), (other, 0.0))
    return [
        _episode(rendering, [*messages, *output], tools, len(messages), f"{name}-{reward:.0f}", name, reward)
        for output, reward in outputs
    ]


def _episode(
    rendering: Any, messages: Messages, tools: Tools, first: int, name: str, group: str, reward: float
) -> Episode:
    """A conversation as a rollout; what the assistant says from message `first` on are its calls."""
    plain = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
    calls = []
    for i in range(first, len(messages)):
        if _is_learned(messages[i]):
            prompt, response = render_answer(rendering, plain[: i + 1], tools)
            nothing = np.zeros(len(response), dtype=np.float32)
            calls.append(made_call(f"{name}-{i}", name, "chat", prompt, response, nothing))
    attempt = Attempt(rollout_id=name, attempt_id="chat", sequence_id=1, start_time=0.0, outcome=Outcome.OK)
    rollout = Rollout(rollout_id=name, input=None, start_time=0.0, metadata={"group": group})
    return Episode(rollout, attempt, reward, calls)


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
