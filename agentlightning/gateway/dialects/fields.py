"""Reading request bodies: typed access to fields, and the rule that no field is silently ignored.

Every field of a body is read, or harmless, or has the one value that changes nothing; anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import msgspec

from agentlightning.gateway.dialects.base import Fields
from agentlightning.gateway.exchange import AnswerSchema, Refusal, ToolChoice, unsupported
from agentlightning.rendering.messages import Message, Tool

T = TypeVar("T")


def streaming_usage(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request of OpenAI's, streamed ones with their tokens told at the end."""
    if not body.get("stream"):
        return body
    return {**body, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}


def check_fields(body: Mapping[str, Any], fields: Fields) -> None:
    """Refuse a field that nobody reads and whose value would matter."""
    for name, value in body.items():
        if name in fields.read or name in fields.harmless or value is None:
            continue
        neutral = fields.neutral.get(name)
        if neutral is None:
            raise unsupported(name, "the gateway does not know this field. Remove it from the request.")
        if value not in neutral:
            raise unsupported(name, f"only {' or '.join(map(repr, neutral)) or 'null'} can be honoured.")


def typed(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """The field as a `kind`; absent or null is `default`."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise Refusal(f"'{name}' must be of type {kind.__name__}, not {value!r}.", code="invalid_type", param=name)
    return value


def required(body: Mapping[str, Any], name: str, kind: type[T]) -> T:
    value = body.get(name)
    if not isinstance(value, kind):
        raise Refusal(f"'{name}' is required and must be of type {kind.__name__}.", code="invalid_type", param=name)
    return value


def between(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """The field as an integer in a range."""
    value = typed(body, name, int, default)
    if not low <= value <= high:
        raise Refusal(f"'{name}' must be between {low} and {high}, not {value}.", code="invalid_value", param=name)
    return value


def asked_settings(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling settings of a body by neutral name; `names` maps wire names to neutral ones, the later ones win."""
    asked = {neutral: body[wire] for wire, neutral in names.items() if body.get(wire) is not None}
    if "stop" in asked:
        stop = asked["stop"]
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise Refusal(
                "'stop' must be a string or a list of strings, none empty.", code="invalid_type", param="stop"
            )
        asked["stop"] = tuple(strings)
        if not strings:
            del asked["stop"]
    return asked


def text_of(content: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """Content as text: a string, a list of text parts, null or absent."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"'{where}' must be a string or a list of parts.", code="invalid_type", param=where)
    return "".join(part_text(part, f"{where}[{index}]", kinds) for index, part in enumerate(content))


def part_text(part: Any, where: str, kinds: Collection[str] = ("text",)) -> str:
    """The text of one part of a content. A part of type "refusal" has it under that name."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(text, str):
        raise unsupported(where, f"this model reads text only, not parts of type {kind!r}.")
    return text


def function_tools(tools: Any) -> list[Tool] | None:
    """OpenAI function tools, without the flags that address the API and not the model."""
    if not tools:
        return None
    if not isinstance(tools, list):
        raise Refusal("'tools' must be a list.", code="invalid_type", param="tools")
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise unsupported(f"tools[{index}]", f"only function tools can be called, not {kind!r}.")
        found.append({"type": "function", "function": {k: v for k, v in function.items() if k != "strict"}})
    return found


def strict_tools(tools: Any, where: str = "parameters") -> dict[str, str]:
    """The tools with `strict: true` by name, with the field that holds the schema of each, which is under `where`."""
    functions = [tool.get("function", tool) for tool in tools or ()]
    return {
        function["name"]: f"tools[{index}].{where}"
        for index, function in enumerate(functions)
        if function.get("strict") is True
    }


def tool_choice_of(choice: Any, tools: list[Tool] | None) -> ToolChoice:
    """OpenAI's tool_choice: auto, none, required, or a named function (in both shapes that are in use)."""
    if choice is None or choice == "auto" or (choice == "none" and not tools):
        return ToolChoice()
    if choice in ("none", "required"):
        found = ToolChoice(choice)
    elif isinstance(choice, dict) and choice.get("type") == "function":
        found = ToolChoice("required", required(typed(choice, "function", dict, choice), "name", str))
    else:
        raise unsupported("tool_choice", f"{choice!r} is none of auto, none, required or a named function.")
    names = [tool["function"]["name"] for tool in tools or ()]
    if found.mode == "required" and (not names or (found.name is not None and found.name not in names)):
        raise Refusal(
            f"'tool_choice' asks for a tool that 'tools' does not have ({found.name or 'any'}).",
            code="invalid_value",
            param="tool_choice",
        )
    return found


def json_schema_of(wanted: Any, where: str) -> AnswerSchema | None:
    """The schema of a text format: none for text, any object in JSON mode, the given one for `json_schema`.

    OpenAI's two APIs put the schema at different depths; `strict` makes no difference, an answer always follows it.
    """
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return AnswerSchema({"type": "object"}, where)
        case "json_schema":
            inner = wanted.get("json_schema", wanted)
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise Refusal(f"'{where}' has no schema.", code="invalid_value", param=where)
            return AnswerSchema(schema, where)
        case _:
            raise Refusal(
                f"'{where}.type' must be text, json_object or json_schema, not {kind!r}.",
                code="invalid_value",
                param=f"{where}.type",
            )


def assistant_message(content: str, calls: list[dict[str, Any]], reasoning: str | None) -> Message:
    """A neutral assistant message; keys that say nothing are left out."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def sent_call(given: Mapping[str, Any], where: str, *, id: str, arguments: str) -> dict[str, Any]:
    """A tool call that a client sends back; `id` and `arguments` are the names these have in its dialect.

    Arguments are a JSON text, or the value that would be written so.
    """
    named, value = given.get("name"), given.get(arguments)
    call_id = given.get(id)
    if not isinstance(named, str) or not named:
        raise Refusal(f"'{where}.name' must be the name of a tool.", code="invalid_type", param=f"{where}.name")
    if call_id is not None and not isinstance(call_id, str):
        raise Refusal(f"'{where}.{id}' must be a string.", code="invalid_type", param=f"{where}.{id}")
    text = value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()
    return neutral_call(call_id or "", named, text)


def neutral_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call inside a neutral message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
