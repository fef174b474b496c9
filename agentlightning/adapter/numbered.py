"""Messages and tools as AgentOps and OpenLLMetry write them: an attribute for each field, with numbers. Pure.

AgentOps writes the tool calls of an answer as spans below the call's own; the prompts of later calls lack them.
"""

from __future__ import annotations

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


def with_calls(messages: Sequence[Message], answers: Iterable[tuple[Sequence[Message], Message]]) -> list[Message]:
    """A prompt whose answers have the tool calls that earlier calls made, and whose results name them.

    answers: the prompt and the answer of each earlier call that made some.
    """
    known = {len(prompt): answer for prompt, answer in answers if _begins(messages, prompt)}
    found: list[Message] = []
    waiting: list[str] = []
    for index, message in enumerate(messages):
        earlier = known.get(index)
        if earlier is not None and message["role"] == "assistant" and not message.get("tool_calls"):
            message = {**message, "content": message["content"] or None, "tool_calls": earlier["tool_calls"]}
        waiting += [c["id"] for c in message.get("tool_calls", ()) if c.get("id")]
        if message["role"] == "tool":
            if not message.get("tool_call_id") and waiting:
                message = {**message, "tool_call_id": waiting[0]}
            waiting = [w for w in waiting if w != message.get("tool_call_id")]
        found.append(message)
    return found


def _begins(messages: Sequence[Message], prompt: Sequence[Message]) -> bool:
    """Whether a prompt goes on from an earlier one, as far as roles and texts tell."""
    pairs = zip(messages, prompt, strict=False)
    is_same = all(m["role"] == p["role"] and (m["content"] or "") == (p["content"] or "") for m, p in pairs)
    return len(messages) > len(prompt) and is_same


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
