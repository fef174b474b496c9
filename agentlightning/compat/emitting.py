"""The decorator `reward`, readers of emitted values, and `propagate=` of the emitters.

This is also what `agentlightning.reward` leads to, which was a module and a function at once.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from agentlightning.emitter import emit_reward
from agentlightning.tracer.trace import Trace, attach, capture, detach
from agentlightning.types import Span
from agentlightning.types.names import MESSAGE, MESSAGE_BODY, OBJECT, OBJECT_JSON
from agentlightning.types.reward import (
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards,
    is_reward_span,
)

__all__ = [
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "reward",
]


def reward(function: Callable[..., Any]) -> Callable[..., Any]:
    """What the function returns is emitted as a reward, and returned."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return _emitted(await function(*args, **kwargs))

        return call_async

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _emitted(function(*args, **kwargs))

    return call


def _emitted(value: Any) -> Any:
    if value is not None:
        emit_reward(value)
    return value


def get_rewards_from_span(span: Span) -> list[Any]:
    """All rewards of a span, the primary one first, each with `.name` and `.value`."""
    from agentlightning.compat.semconv import RewardPydanticModel

    return [RewardPydanticModel(name=name, value=value) for name, value in get_rewards(span).items()]


def get_message_value(span: Span) -> str | None:
    """The text of an emitted message; None for a span of another kind."""
    return span.attributes.get(MESSAGE_BODY) if span.name == MESSAGE else None


def get_object_value(span: Span) -> Any:
    """The value of an emitted object; None for a span of another kind."""
    if span.name != OBJECT:
        return None
    text = span.attributes.get(OBJECT_JSON, span.attributes.get("agentlightning.object.literal"))
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text


def propagate(arguments: dict[str, Any], value: bool) -> AbstractContextManager[None]:
    """`propagate=False`: the span is made and returned, and recorded nowhere."""
    return nullcontext() if value else _aside()


@contextmanager
def _aside() -> Iterator[None]:
    """A trace that nobody keeps."""
    outside = capture()
    attach(Trace())
    try:
        yield
    finally:
        detach(outside)
