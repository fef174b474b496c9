"""Reading request bodies: typed access to fields, and the rule that nothing is refused for being unknown.

Every field of a body, and of the objects in it, is honoured or left out. What is left out is never silent: a `Reading`
collects it, and it travels with the request. Only a value that an honoured field cannot have is refused.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from agentlightning.gateway.dialects.base import Fields, Kinds
from agentlightning.gateway.dialects.tables.common import ALLOWED, CHOICE, FORMAT, FORMATS
from agentlightning.gateway.exchange import AnswerSchema, Refusal, ToolChoice, unsupported
from agentlightning.rendering.messages import Message, Tool
from agentlightning.types.call import MEDIA, LeftOut

T = TypeVar("T")


def streaming_usage(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request of OpenAI's, streamed ones with their tokens told at the end."""
    if not body.get("stream"):
        return body
    return {**body, "stream_options": {**(body.get("stream_options") or {}), "include_usage": True}}


_MOST_LEFT_OUT = 64
_LONGEST_PATH = 100
_POSITION = re.compile(r"\[\d+\]")
_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.$\[\]:-]")
_UNKNOWN = "nothing here knows it"
_FORMS = {
    r"messages\[\d+\]": "{'role': 'user', 'content': '…'}",
    "response_format": "{'type': 'json_object'}",
    "stream_options": "{'include_usage': True}",
}
"""How objects are written, by the patterns of their places."""
_HARMLESS = "it is not meant to change an answer"


class Reading:
    """One request while it is read: collects what of it is left out. Paths are those of the request's own JSON."""

    def __init__(self) -> None:
        self._found: dict[str, LeftOut] = {}

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(self._found.values())

    def check(self, given: Mapping[str, Any], fields: Fields, where: str = "") -> None:
        """Leave out the fields of an object that do not act. Raises `Refusal` for one that cannot be done without."""
        for name, value in given.items():
            if name in fields.acting or value is None:
                continue
            path = f"{where}.{name}" if where else name
            cannot = fields.unavailable.get(name)
            if cannot is not None:
                if value in cannot.neutral:
                    continue
                if cannot.needed:
                    raise unsupported(path, cannot.why)
                self.unavailable(path, cannot.why)
            elif name in fields.harmless:
                self.harmless(path)
            else:
                self.unknown(path)

    def known(self, given: Any, kinds: Kinds, where: str) -> str | None:
        """The kind of an object that is honoured; None if the object is left out. Raises `Refusal` if it is none."""
        if not isinstance(given, Mapping):
            such_as = next((f", such as {form}" for what, form in _FORMS.items() if re.fullmatch(what, where)), "")
            raise Refusal(f"'{where}' must be an object{such_as}.", code="invalid_type", param=where)
        kind = given.get(kinds.by, kinds.default)
        fields = kinds.known.get(kind) if isinstance(kind, str) else None
        if fields is not None:
            self.check(given, fields, where)
            return kind
        path = f"{where}:{kind}"
        if kind in kinds.harmless:
            self.harmless(path)
        elif (why := kinds.why(kind)) is not None:
            self.unavailable(path, why)
        else:
            self.unknown(path)
        return None

    def harmless(self, path: str) -> None:
        self._leave_out(path, _HARMLESS, "harmless")

    def unknown(self, path: str) -> None:
        self._leave_out(path, _UNKNOWN, "unknown")

    def unavailable(self, path: str, why: str) -> None:
        self._leave_out(path, why, "unavailable")

    def _leave_out(self, path: str, why: str, kind: Literal["harmless", "unknown", "unavailable"]) -> None:
        if len(self._found) < _MOST_LEFT_OUT:
            path = _UNPRINTABLE.sub("?", _POSITION.sub("[]", path[: 2 * _LONGEST_PATH]))[:_LONGEST_PATH]
            self._found.setdefault(path, LeftOut(path, why, kind))


def check_strict(left_out: Sequence[LeftOut]) -> None:
    """Refuse a request of which something is left out that its client may have meant. For gateways that are strict."""
    for one in left_out:
        if one.kind != "harmless":
            raise unsupported(one.field, f"{one.why}. Remove it from the request, or serve without `strict_requests`.")


def typed(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """The field as a `kind`; absent or null is `default`."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _of_another_type(name, name, kind, value)
    return value


_EXAMPLES = {
    ("messages", list): " It is [{'role': 'user', 'content': '…'}].",
    ("tools", list): " It is a list, also of one tool.",
    ("logprobs", bool): " It is true, with top_logprobs for the number of others.",
}


def _of_another_type(param: str, name: str, kind: type, value: object) -> Refusal:
    words = f"'{param}' must be of type {kind.__name__}, not {reprlib.repr(value)}.{_EXAMPLES.get((param, kind), '')}"
    return Refusal(words, code="invalid_type", param=param)


def required(body: Mapping[str, Any], name: str, kind: type[T], where: str = "") -> T:
    """The field as a `kind`. `where`: which part of the request `body` is, such as tools[0]; empty for all of it."""
    value = body.get(name)
    param = f"{where}.{name}" if where else name
    if value is not None and not isinstance(value, kind):
        raise _of_another_type(param, name, kind, value)
    if not isinstance(value, kind):
        raise Refusal(f"'{param}' is required and must be of type {kind.__name__}.", code="invalid_type", param=param)
    return value


def between(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    """The field as an integer in a range."""
    value = typed(body, name, int, default)
    if not low <= value <= high:
        raise Refusal(f"'{name}' must be between {low} and {high}, not {value}.", code="invalid_value", param=name)
    return value


def prompt_logprobs_of(body: Mapping[str, Any]) -> int | None:
    """vLLM's: how many alternatives to tell of each token of the prompt; None: nothing."""
    if body.get("prompt_logprobs") is None or body["prompt_logprobs"] is False:
        return None
    return between(body, "prompt_logprobs", 0, 0, 20)


def given_settings(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling settings of a body by neutral name; `names` maps wire names to neutral ones, the later ones win."""
    given = {neutral: body[wire] for wire, neutral in names.items() if body.get(wire) is not None}
    if "stop" in given:
        stop = given["stop"]
        strings = [stop] if isinstance(stop, str) else stop
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise Refusal(
                "'stop' must be a string or a list of strings, none empty.", code="invalid_type", param="stop"
            )
        given["stop"] = tuple(strings)
        if not strings:
            del given["stop"]
    return given


def text_of(content: Any, where: str, parts: Kinds, reading: Reading) -> str:
    """Content as text: a string, a list of parts, null or absent."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(f"'{where}' must be a string or a list of parts.", code="invalid_type", param=where)
    return "".join(part_text(part, f"{where}[{index}]", parts, reading) for index, part in enumerate(content))


def part_text(part: Any, where: str, parts: Kinds, reading: Reading) -> str:
    """The text of one part of a content. A part of type "refusal" has it under that name.

    In place of what is known and no text, an image for example, stand a few words, so that the model can say so.
    """
    if isinstance(part, str):
        return part
    kind = reading.known(part, parts, where)
    if kind is None:
        return f"[{part[parts.by]} left out: it is no text]" if parts.why(part.get(parts.by)) == MEDIA else ""
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise Refusal(f"'{where}' has no text.", code="invalid_type", param=where)
    return text


def tool_name(tool: Mapping[str, Any], where: str) -> str:
    """The name of a tool that a request declares."""
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise Refusal(f"'{where}.name' must be the name of a tool.", code="invalid_type", param=f"{where}.name")
    return name


class ToolSet(NamedTuple):
    """The tools of a request that the model is given."""

    declared: list[Tool]
    strict: dict[str, str]
    """Those with `strict: true` by name, with the field that holds the schema of each."""
    all_given: bool
    """False where some were left out."""
    origins: Mapping[str, Any] = {}
    """Those that the client declared as something else (`tools.Origin`), by name."""


def tool_choice_of(choice: Any, tools: ToolSet, reading: Reading) -> ToolChoice:
    """OpenAI's tool_choice: auto, none, required, or a named function (in both shapes that are in use).

    One that asks for a tool that was left out leaves the model free to choose.
    """
    names = [tool["function"]["name"] for tool in tools.declared]
    if choice is None or choice == "auto" or (choice == "none" and not names):
        return ToolChoice()
    if choice == "none":
        return ToolChoice("none")
    if isinstance(choice, str):
        if choice != "required":
            named = {"type": "function", "function": {"name": choice}}
            one = f" The tool is named so: {named}." if choice in names else ""
            raise unsupported("tool_choice", f"{choice!r} is none of auto, none, required or a named function.{one}")
        return required_choice(ToolChoice("required"), names, tools.all_given, reading)
    if not isinstance(choice, dict):
        raise Refusal("'tool_choice' must be a string or an object.", code="invalid_type", param="tool_choice")
    reading.check(choice, CHOICE, "tool_choice")
    match choice.get("type"):
        case "function" | "custom" as kind:
            named = typed(choice, kind, dict, {"name": choice.get("name")})
            reading.check(named, _NAMED, f"tool_choice.{kind}")
            name = _declared(required(named, "name", str), tools)
            return required_choice(ToolChoice("required", name), names, tools.all_given, reading)
        case "allowed_tools":
            return _allowed(choice, names, tools, reading)
        case kind:
            reading.unavailable(f"tool_choice:{kind}", "the tool is not among those that the model is given")
            return ToolChoice()


_NAMED = Fields(honoured=("name",))


def _declared(name: str, tools: ToolSet) -> str:
    """The name that the model knows a tool by."""
    return next((flat for flat, origin in tools.origins.items() if origin.name == name), name)


def _allowed(choice: Mapping[str, Any], names: Sequence[str], tools: ToolSet, reading: Reading) -> ToolChoice:
    """A choice among some of the tools (OpenAI's two APIs put them at different depths)."""
    given = typed(choice, "allowed_tools", dict, choice)
    if given is not choice:
        reading.check(given, ALLOWED, "tool_choice.allowed_tools")
    mode = typed(given, "mode", str, "auto")
    if mode not in ("auto", "required"):
        raise Refusal("'tool_choice.mode' must be auto or required.", code="invalid_value", param="tool_choice")
    meant: set[str] = set()
    for one in typed(given, "tools", list, []):
        inner = one.get(one.get("type")) if isinstance(one, Mapping) else None
        name = (inner if isinstance(inner, Mapping) else one if isinstance(one, Mapping) else {}).get("name")
        meant |= {_declared(name, tools)} if isinstance(name, str) else set()
    among = tuple(name for name in names if name in meant)
    if not among:
        if tools.all_given:
            raise Refusal("'tool_choice' allows no tool that 'tools' has.", code="invalid_value", param="tool_choice")
        reading.unavailable("tool_choice", "the tools that it allows were left out")
        return ToolChoice("none") if names else ToolChoice()
    return ToolChoice(mode, among=among if len(among) < len(names) else ())


def required_choice(choice: ToolChoice, names: Sequence[str], all_given: bool, reading: Reading) -> ToolChoice:
    """A choice that requires a tool, if there is one. Raises `Refusal` where none was left out that could be meant."""
    if names and (choice.name is None or choice.name in names):
        return choice
    if not all_given:
        reading.unavailable("tool_choice", "the tool that it asks for was left out")
        return ToolChoice()
    raise Refusal(
        f"'tool_choice' asks for a tool that 'tools' does not have ({choice.name or 'any'}).",
        code="invalid_value",
        param="tool_choice",
    )


def json_schema_of(wanted: Any, where: str, reading: Reading) -> AnswerSchema | None:
    """The schema of a text format: none for text, any object in JSON mode, the given one for `json_schema`.

    OpenAI's two APIs put the schema at different depths; `strict` makes no difference, an answer always follows it.
    """
    if wanted is None:
        return None
    match reading.known(wanted, FORMATS, where):
        case "json_object":
            return AnswerSchema({"type": "object"}, where)
        case "json_schema":
            inner = wanted.get("json_schema")
            if isinstance(inner, dict):
                reading.check(inner, FORMAT, f"{where}.json_schema")
            else:
                inner = wanted
            schema = inner.get("schema")
            if not isinstance(schema, dict):
                words = f"'{where}' has no schema."
                if isinstance(wanted.get("json_schema"), dict):
                    words += (
                        " It is one level down: {'type': 'json_schema', 'json_schema': {'name': '…', 'schema': {…}}}."
                    )
                raise Refusal(words, code="invalid_value", param=where)
            return AnswerSchema(schema, where)
        case _:
            return None


def begun_answer(messages: list[Message], where: str) -> tuple[list[Message], str]:
    """A conversation without the answer that the client began, and what it began it with: a last message of the
    assistant. Raises `Refusal` for one that cannot be gone on from.
    """
    last = messages[-1]
    if last["role"] != "assistant":
        return messages, ""
    if len(messages) == 1 or not last["content"] or last.get("tool_calls") or last.get("reasoning_content"):
        raise unsupported(where, "the last one is the assistant's, and only a text that answers another goes on.")
    return messages[:-1], last["content"]


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
