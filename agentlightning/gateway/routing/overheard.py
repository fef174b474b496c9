"""What another provider was asked and what it said, read from the bodies that went through. Pure.

So that its calls, too, can be read as conversations and joined with the spans of frameworks. What cannot be read (an
image, a body that was cut off, fields of the provider's own) is left out; the span keeps the bodies as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects import Dialect, chat, messages, responses
from agentlightning.gateway.exchange import Refusal
from agentlightning.rendering.messages import Message, Tool

Body = dict[str, Any]


class Overheard(msgspec.Struct, frozen=True, kw_only=True):
    """A forwarded call, as far as it can be read."""

    asked: Sequence[Message] = ()
    tools: Sequence[Tool] | None = None
    said: Message | None = None
    answer: Mapping[str, Any] = {}
    """The provider's answer as one object, also if it was streamed."""


def overhear(dialect: Dialect, request: Mapping[str, Any], response: bytes) -> Overheard:
    """Read a request and the bytes of its answer."""
    answer = _whole(dialect.name, response)
    core = {name: request[name] for name in _CORE.get(dialect.name, ()) if name in request}
    try:
        if not core or request.get("previous_response_id"):  # the provider knows more than is said here
            return Overheard(answer=answer)
        parsed = dialect.parse({"model": "any", **core}, {})
        said = _SAID[dialect.name](answer) if answer else None
    except (Refusal, LookupError, TypeError, ValueError, AttributeError):
        return Overheard(answer=answer)
    return Overheard(asked=parsed.messages, tools=parsed.tools, said=said, answer=answer)


_CORE: Mapping[str, Sequence[str]] = {
    "chat": ("messages", "tools"),
    "responses": ("input", "instructions", "tools"),
    "messages": ("messages", "system", "tools"),
}
"""The fields that hold the conversation."""

_SAID: Mapping[str, Callable[[Body], Message]] = {
    "chat": lambda answer: chat.neutral_message(answer["choices"][0]["message"], "message"),
    "responses": lambda answer: responses.neutral_messages(answer["output"])[-1],
    "messages": lambda answer: messages.neutral_answer(answer["content"], "content"),
}


def _whole(dialect: str, response: bytes) -> Body:
    """The answer as an object; empty if it is none."""
    found = _object(response)
    if found is None and dialect in _GATHER:
        lines = [line[5:].strip() for line in response.split(b"\n") if line.startswith(b"data:")]
        events = [event for event in map(_object, lines) if event is not None]
        try:
            found = _GATHER[dialect](events)
        except (LookupError, TypeError, ValueError, AttributeError):
            found = None
    return found or {}


def _object(text: bytes) -> Body | None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _chat_stream(events: Sequence[Body]) -> Body:
    whole: Body = {}
    begun = False
    said: Body = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: dict[int, Body] = {}
    for event in events:
        whole |= {name: event[name] for name in ("id", "model", "usage") if event.get(name) is not None}
        for choice in event.get("choices") or ():
            begun = True
            delta = (choice.get("delta") or {}) if choice.get("index", 0) == 0 else {}
            for name in ("content", "reasoning_content"):
                said[name] += delta.get(name) or ""
            for part in delta.get("tool_calls") or ():
                empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part.get("index", 0), empty)
                call["id"] = part.get("id") or call["id"]
                for name, text in (part.get("function") or {}).items():
                    call["function"][name] = call["function"].get(name, "") + (text or "")
    if calls:
        said["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {**whole, "choices": [{"message": said}]} if begun else whole


def _responses_stream(events: Sequence[Body]) -> Body:
    return next((e["response"] for e in reversed(events) if e.get("type") in _ENDS), {})


_ENDS = ("response.completed", "response.incomplete")


def _messages_stream(events: Sequence[Body]) -> Body:
    whole: Body = {}
    blocks: dict[int, Body] = {}
    arguments: dict[int, str] = {}
    for event in events:
        match event.get("type"):
            case "message_start":
                whole = dict(event["message"])
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta":
                delta, block = event["delta"], blocks[event["index"]]
                for name in ("text", "thinking"):
                    if name in delta:
                        block[name] = block.get(name, "") + delta[name]
                if "partial_json" in delta:
                    arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            case "message_delta":
                whole["usage"] = {**whole.get("usage", {}), **(event.get("usage") or {})}
    for index, text in arguments.items():
        blocks[index]["input"] = msgspec.json.decode(text or "{}")
    return {**whole, "content": [blocks[index] for index in sorted(blocks)]} if whole else {}


_GATHER: Mapping[str, Callable[[Sequence[Body]], Body]] = {
    "chat": _chat_stream,
    "responses": _responses_stream,
    "messages": _messages_stream,
}
"""The events of a stream as the object that would have come without it."""
