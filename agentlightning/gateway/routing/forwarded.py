"""What another provider was asked and what it said, read from the bodies that went through. Pure.

So that its calls, too, can be read as conversations and joined with the spans of frameworks. What cannot be read (an
image, a body that was cut off, fields of the provider's own) is left out; the span keeps the bodies as they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects import Dialect
from agentlightning.gateway.exchange import Refusal
from agentlightning.rendering.messages import Message, Tool

Body = dict[str, Any]


class ForwardedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """A forwarded call, as far as it can be read."""

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] | None = None
    answer_message: Message | None = None
    answer: Mapping[str, Any] = {}
    """The provider's answer as one object, also if it was streamed."""


def read_forwarded(dialect: Dialect, request: Mapping[str, Any], answer: Body) -> ForwardedMessages:
    """Read a request and its answer."""
    core = {name: request[name] for name in dialect.conversation_fields if name in request}
    try:
        if not core or request.get("previous_response_id"):  # the provider knows more than is said here
            return ForwardedMessages(answer=answer)
        parsed = dialect.parse({"model": "any", **core}, {})
        answer_message = dialect.answer_message(answer) if answer else None
    except (Refusal, LookupError, TypeError, ValueError, AttributeError):
        return ForwardedMessages(answer=answer)
    return ForwardedMessages(messages=parsed.messages, tools=parsed.tools, answer_message=answer_message, answer=answer)


def answer_in(dialect: Dialect, response: bytes) -> Body:
    """The bytes of an answer as one object; empty if they are none."""
    found = _json(response)
    try:
        if not isinstance(found, dict):
            found = dialect.gather(_events(response) if found is None else found)
        return dialect.in_openai_terms(found)
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _events(response: bytes) -> list[Body]:
    """The objects of a stream of server-sent events."""
    lines = [line[5:].strip() for line in response.split(b"\n") if line.startswith(b"data:")]
    return [event for event in map(_json, lines) if isinstance(event, dict)]


def _json(text: bytes) -> Any:
    """What JSON says; None for anything else."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
