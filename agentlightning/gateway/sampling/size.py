"""How long a request is, as far as that is known before it is tokenised, the refusal of one that is too long, and
`Truncation`, which shortens a conversation: the oldest tool results first, then the oldest messages.

Truncation is for agents that cannot handle the provider's "context length exceeded". The system prompt, the first
question (the task) and the last step always stay. Truncations come one after another in a fixed order, and a longer
conversation has the same first ones: so one that grows is cut in the same places for a while, and its tokens continue.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from agentlightning.errors import ModelError
from agentlightning.gateway.exchange import CallRequest, Refusal
from agentlightning.rendering import Message, Rendering, Tool

LONG = 10_000
"""Texts of so many characters or more are tokenised beside the event loop."""
MANY = 200
"""So many messages or more are not handled all at once."""
COUNTED = 4
"""Prompts up to so many contexts long are counted exactly, so that an agent knows how much to leave out."""


def too_long(prompt_tokens: int, max_context: int, *, at_least: bool = False) -> Refusal:
    """The refusal. `at_least`: the prompt has more tokens than were counted."""
    return Refusal(
        # The words by which the clients of both providers recognise this error.
        f"prompt is too long: {prompt_tokens} tokens > {max_context} maximum. This model's maximum "
        f"context length is {max_context} tokens. Please reduce the length of the messages, or raise "
        "max_context of the algorithm, if the model can do more."
        + (" The prompt has more tokens than are named here: they were counted no further." if at_least else ""),
        code="context_length_exceeded",
        param="messages",
    )


def fewest_tokens(request: CallRequest, rendering: Rendering, least: Callable[[], int]) -> int:
    """A number of tokens that the request has at least, judged by its length; `least`: see `least_of`."""
    tokens = 0
    if len(request.messages) > MANY:
        tokens = least() * sum(bool(m["content"] or m.get("tool_calls")) for m in request.messages)
    return max(tokens, size_of(request) // rendering.longest_token)


def least_of(rendering: Rendering) -> int:
    """How many tokens the model's format adds to each message, at least."""
    user: Message = {"role": "user", "content": "x"}
    answer: Message = {"role": "assistant", "content": "x"}
    alone = len(rendering.render([user], None))
    added: list[int] = []
    for some in ([user] * 8, [answer, user] * 4):
        with suppress(ModelError):  # a template may want the roles to alternate
            added.append(len(rendering.render([user, *some], None)) - alone)
    return max(1, min(added, default=0) // 8 - 1)


def size_of(request: CallRequest) -> int:
    """Characters of a request's texts."""
    return length_of(texts_of(request)) if request.size is None else request.size


def texts_of(request: CallRequest) -> Iterator[str]:
    if isinstance(request.prompt, str):
        yield request.prompt
    yield from texts_in(request.messages, request.tools)


def length_of(texts: Iterable[str]) -> int:
    return sum(map(len, texts))


def texts_in(messages: Sequence[Message], tools: Sequence[Tool] | None) -> Iterator[str]:
    """All that a client may write at length."""
    for message in messages:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield call["function"]["arguments"]
    for tool in tools or ():
        yield tool["function"]["name"]
        yield str(tool["function"].get("description", ""))
        yield from strings_in(tool["function"].get("parameters"))


def strings_in(value: Any) -> Iterator[str]:
    """All texts in a value of JSON, the names of fields among them; an empty one for whatever else is in it, so that
    no step takes long.
    """
    left = [value]
    while left:
        value = left.pop()
        yield value if isinstance(value, str) else ""
        if isinstance(value, dict):
            yield from value
            left += value.values()
        elif isinstance(value, list):
            left += value


def is_short(messages: Sequence[Message], tools: Sequence[Tool] | None) -> bool:
    """Whether the messages are tokenised at once. Reasoning counts here, though a prompt may leave it out."""
    if len(messages) > MANY:
        return False
    left = LONG - sum(len(message.get("reasoning_content") or "") for message in messages)
    for count, text in enumerate(texts_in(messages, tools)):
        left -= len(text)
        if left < 0 or count > LONG:
            return False
    return left >= 0


_KEPT = 200
"""How many characters of a shortened tool result stay."""


class Truncation:
    """The ways to truncate one conversation, from the mildest on."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._results = [i for i, m in enumerate(messages) if m["role"] == "tool" and len(m["content"]) > 2 * _KEPT]
        self._head = next((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), 0)
        answers = [i for i in range(self._head, len(messages)) if messages[i]["role"] == "assistant"]
        self._steps = answers[1:]
        """Where the conversation may go on after its head: at an answer, so that no result comes without its call."""

    def __iter__(self) -> Iterator[tuple[list[Message], dict[str, int]]]:
        """Each way, with how many results it shortens and how many messages it leaves out. Rounded up, so that the
        conversation's next requests are cut alike.
        """
        for shortened in _ladder(len(self._results)):
            yield self._truncated(shortened, None), {"results": shortened, "messages": 0}
        for dropped in _ladder(len(self._steps)):
            start = self._steps[dropped - 1]
            done = {"results": len(self._results), "messages": start - self._head}
            yield self._truncated(len(self._results), start), done

    def _truncated(self, shortened: int, start: int | None) -> list[Message]:
        messages = list(self._messages)
        for i in self._results[:shortened]:
            text = messages[i]["content"]
            messages[i] = {**messages[i], "content": text[:_KEPT] + _shortened(len(text) - _KEPT)}
        if start is None:
            return messages
        head, rest = messages[: self._head], messages[start:]
        note = f"[{start - self._head} earlier messages were left out to fit the context]"
        if head:  # beside the task, because many templates want the roles to take turns
            head[-1] = {**head[-1], "content": f"{head[-1]['content']}\n\n{note}"}
        return [*head, *rest]


def _shortened(characters: int) -> str:
    return f"\n[{characters} more characters were left out to fit the context]"


def _ladder(count: int) -> Iterator[int]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24, … and `count` itself."""
    step, at = 1, 1
    while at < count:
        yield at
        step = max(step, 1 << max(0, at.bit_length() - 2))
        at += step
    if count:
        yield count
