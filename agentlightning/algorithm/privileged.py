"""Privileged context: what only the teacher is told when a policy distills itself.

The teacher sees the conversation that the policy had, with one message more before it. The policy's own tokens stay as
they were sampled: the message is put in front of them as tokens, and nothing is rendered a second time.
Self-distillation fine-tuning (SDFT, Shenfeld et al., arXiv 2601.19897) takes a demonstration of the task as that
message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from agentlightning.algorithm.episode import Episode
from agentlightning.errors import ConfigError
from agentlightning.learner.packing import CreditedCall
from agentlightning.rendering.base import Rendering
from agentlightning.types.arrays import Int32Array, np


class PrivilegedContext:
    """The text that stands under a key of each task."""

    def __init__(self, key: str, model: str, renderer: str | None) -> None:
        self._key = key
        self._model = model
        self._renderer = renderer
        self._tokens: dict[str, Int32Array] = {}

    def shown(self, calls: Sequence[CreditedCall], episodes: Sequence[Episode]) -> list[CreditedCall]:
        """The calls as the teacher sees them, in their order. Raises ConfigError for a task without the text."""
        tasks = {e.rollout.rollout_id: e.rollout.input for e in episodes}
        return [self._with(c, self._message(tasks[c.call.info.rollout_id])) for c in calls]

    def _with(self, credited: CreditedCall, message: Int32Array) -> CreditedCall:
        call = credited.call
        return replace(credited, call=replace(call, prompt_ids=in_front(message, call.prompt_ids)))

    def _message(self, task: Any) -> Int32Array:
        text = task.get(self._key) if isinstance(task, Mapping) else None
        if not isinstance(text, str) or not text:
            raise ConfigError(
                f"What the teacher is told stands under {self._key!r} of each task, as a text; here it is {text!r}. "
                "Give tasks that have it, or name another key: hint='…'."
            )
        if text not in self._tokens:
            self._tokens[text] = message_tokens(self._rendering, text)
        return self._tokens[text]

    @cached_property
    def _rendering(self) -> Rendering:
        from agentlightning.models import resolve_model
        from agentlightning.rendering import load_rendering

        return load_rendering(resolve_model(self._model), self._renderer)


def message_tokens(rendering: Rendering, text: str) -> Int32Array:
    """A system message up to where another message begins, with the first tokens of that one.

    It is what a prompt of that message alone and one of it and a question have in common.
    """
    message: Any = {"role": "system", "content": text}
    alone = rendering.render([message], None)
    followed = rendering.render([message, {"role": "user", "content": "?"}], None)
    shorter = min(len(alone), len(followed))
    differ = np.flatnonzero(alone[:shorter] != followed[:shorter])
    return alone[: differ[0] if len(differ) else shorter]


def in_front(message: Int32Array, prompt: Int32Array) -> Int32Array:
    """The message and then the prompt. A token that begins every text stands once, and so does what both share where
    they meet."""
    if prompt[0] == message[0] and message[0] not in message[1:] and len(prompt) > 1:
        prompt = prompt[1:]
    shared = (k for k in range(min(len(message), len(prompt)), 0, -1) if np.array_equal(message[-k:], prompt[:k]))
    return np.concatenate([message, prompt[next(shared, 0) :]])
