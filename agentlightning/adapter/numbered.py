"""Messages and tools as AgentOps and OpenLLMetry write them: an attribute for each field, with numbers. Pure.

AgentOps writes the tool calls of an answer as spans below the call's own; the prompts of later calls lack them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from agentlightning.reading import parsed_json
from agentlightning.types import Span

Message = dict[str, Any]
_FUNCTIONS = ("gen_ai.request.functions", "llm.request.functions")


def numbered_messages(attributes: Mapping[str, Any], prefix: str) -> list[Message]:
    """Messages as AgentOps and OpenLLMetry write them: `gen_ai.prompt.0.role`, `gen_ai.prompt.0.content`, …"""
    found: list[Message] = []
    for keys in below_numbers(attributes, prefix):
        role = "assistant" if prefix == "gen_ai.completion" else "user"
        message: Message = {"role": str(keys.get("role") or role), "content": _content(keys.get("content", ""))}
        if "tool_call_id" in keys:
            message["tool_call_id"] = keys["tool_call_id"]
        if calls := _numbered_calls(keys):
            message |= {"content": message["content"] or None, "tool_calls": calls}
        found.append(message)
    return found


def below_numbers(attributes: Mapping[str, Any], prefix: str, then: str = "") -> Iterator[dict[str, Any]]:
    """What stands below `PREFIX.0.THEN`, `PREFIX.1.THEN` and so on, up to the first number that is missing."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in attributes.items():
        if key.startswith(f"{prefix}."):
            number, dot, rest = key[len(prefix) + 1 :].partition(".")
            if dot and rest.startswith(then):
                found.setdefault(number, {})[rest[len(then) :]] = value
    for index in count():
        if str(index) not in found:
            return
        yield found[str(index)]


def _numbered_calls(keys: Mapping[str, Any]) -> list[Any]:
    calls: list[Any] = []
    for index in count():
        name = keys.get(f"tool_calls.{index}.name", keys.get(f"tool_calls.{index}.function.name"))
        if name is None:
            return calls
        arguments = keys.get(f"tool_calls.{index}.arguments", keys.get(f"tool_calls.{index}.function.arguments", "{}"))
        function = {"name": name, "arguments": arguments}
        calls.append({"id": keys.get(f"tool_calls.{index}.id"), "type": "function", "function": function})
    raise AssertionError("count() has no end")


def numbered_tools(attributes: Mapping[str, Any]) -> list[Any]:
    """The tools of a request as AgentOps and OpenLLMetry write them: `gen_ai.request.functions.0.name`, …"""
    tools: list[Any] = []
    for index in count():
        at = next((f"{prefix}.{index}" for prefix in _FUNCTIONS if f"{prefix}.{index}.name" in attributes), None)
        if at is None:
            return tools
        fields = {key: attributes.get(f"{at}.{key}") for key in ("name", "description")}
        fields["parameters"] = read_json(attributes.get(f"{at}.parameters"), None)
        function = {key: value for key, value in fields.items() if value is not None}
        tools.append({"type": "function", "function": function})
    raise AssertionError("count() has no end")


def _content(text: Any) -> Any:
    """A content of several parts, such as images, is written as the JSON of its list."""
    parts = read_json(text, None) if isinstance(text, str) and text.lstrip().startswith("[{") else None
    whole = isinstance(parts, list) and all(isinstance(part, dict) and "type" in part for part in parts)
    return parts if whole else text


def calls_below(children: Iterable[Span]) -> list[Any]:
    """The tool calls that the spans below a model call's tell of."""
    found: list[Any] = []
    for span in children:
        a = span.attributes
        if (name := a.get("tool.name")) is None:
            continue
        function = {"name": name, "arguments": a.get("tool.parameters", "{}")}
        found.append({"id": a.get("tool.call.id"), "type": a.get("tool.call.type", "function"), "function": function})
    return found


class MadeCalls:
    """The tool calls that earlier answers made, found again in prompts that go on from theirs: as far as roles and
    texts tell, which are places in a tree.
    """

    def __init__(self) -> None:
        self._places: dict[tuple[int, str, str], int] = {}
        self._answers: dict[int, Message] = {}
        self._new: list[tuple[Sequence[Message], Message]] = []

    def add(self, prompt: Sequence[Message], answer: Message) -> None:
        """An answer with tool calls, and its prompt. It is given its place when one is looked for."""
        self._new.append((prompt, answer))

    def _place(self) -> None:
        for prompt, answer in self._new:
            at = 0
            for message in prompt:
                at = self._places.setdefault((at, *_role_and_text(message)), len(self._places) + 1)
            self._answers[at] = answer
        self._new.clear()

    def filled(self, messages: Sequence[Message]) -> list[Message]:
        """A prompt whose answers have the tool calls that earlier calls made, and whose results name them."""
        self._place()
        found: list[Message] = []
        waiting: OrderedDict[str, None] = OrderedDict()
        at: int | None = 0
        for message in messages:
            earlier = None if at is None else self._answers.get(at)
            at = None if at is None else self._places.get((at, *_role_and_text(message)))
            if earlier is not None and message["role"] == "assistant" and not message.get("tool_calls"):
                message = {**message, "content": message["content"] or None, "tool_calls": earlier["tool_calls"]}
            waiting |= {str(c["id"]): None for c in message.get("tool_calls", ()) if c.get("id")}
            if message["role"] == "tool":
                if not message.get("tool_call_id") and waiting:
                    message = {**message, "tool_call_id": next(iter(waiting))}
                waiting.pop(str(message.get("tool_call_id")), None)
            found.append(message)
        return found


def _role_and_text(message: Message) -> tuple[str, str]:
    content = message["content"] or ""
    return message["role"], content if isinstance(content, str) else json.dumps(content, sort_keys=True, default=str)


def text_at(attributes: Mapping[str, Any], name: str) -> str | None:
    """An attribute that names something; None where it is no text, as an agent's own spans may have it."""
    value = attributes.get(name)
    return value if isinstance(value, str) else None


def messages_in(value: Any) -> list[dict[str, Any]]:
    """The messages of an attribute in the form of the GenAI conventions. An agent's own spans may hold anything there:
    what is no message, or no part of one, is left out."""
    found: list[dict[str, Any]] = []
    for message in _objects(read_json(value, value)):
        parts = [{**part, "type": str(part.get("type", "text"))} for part in _objects(message.get("parts"))]
        found.append({**message, "role": str(message.get("role", "user")), "parts": parts})
    return found


def tools_in(value: Any) -> list[dict[str, Any]]:
    """The definitions of tools that an attribute holds; what is none is left out."""
    return _objects(read_json(value, value))


def _objects(value: Any) -> list[dict[str, Any]]:
    values: list[Any] = [*value] if isinstance(value, list | tuple) else []
    return [one for one in values if isinstance(one, dict)]


def read_json(text: Any, default: Any) -> Any:
    """The value of a JSON text; `default` for what is none."""
    try:
        return parsed_json(text) if isinstance(text, str) else default
    except ValueError:
        return default
