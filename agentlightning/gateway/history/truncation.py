"""Truncating a conversation that is too long for the model: the oldest tool results first, then the oldest messages.

For agents that cannot handle the provider's "context length exceeded". The system prompt, the first question (the task)
and the last step always stay. Truncations come one after another in a fixed order, and a longer conversation has the
same first ones: so one that grows is cut in the same places for a while, and its tokens continue. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from agentlightning.rendering.messages import Message

_KEPT = 200
"""How many characters of a tool result stay."""


class Truncation:
    """The ways to truncate one conversation, from the mildest on."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = list(messages)
        self._results = [i for i, m in enumerate(messages) if m["role"] == "tool" and len(m["content"]) > 2 * _KEPT]
        self._head = next((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), 0)
        answers = [i for i in range(self._head, len(messages)) if messages[i]["role"] == "assistant"]
        self._steps = answers[1:]
        """Where it may go on after its head: at an answer, so that results of calls never come without them."""

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
