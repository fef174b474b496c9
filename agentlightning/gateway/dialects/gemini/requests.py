"""Requests of the Gemini API as neutral ones: turns, settings, functions, the form of the answer. Schemas, which
Google's APIs spell after OpenAPI 3.0, become JSON schemas. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import Fields
from agentlightning.gateway.dialects.fields import (
    Reading,
    ToolSet,
    assistant_message,
    given_settings,
    required,
    sent_call,
    tool_name,
    typed,
)
from agentlightning.gateway.dialects.gemini.replies import reasoning_in, unwrapped
from agentlightning.gateway.dialects.tables import gemini as tables
from agentlightning.gateway.dialects.template import effort_of, no_thought
from agentlightning.gateway.exchange import AnswerSchema, Refusal, TemplateArgument, ToolChoice
from agentlightning.gateway.sampling.settings import check_settings
from agentlightning.reading import whole_number
from agentlightning.rendering.messages import Message, Tool

MOST_CHOICES, MOST_TOP_LOGPROBS = 128, 20

SETTINGS = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}


def named(given: Any, fields: Fields, where: str, reading: Reading) -> dict[str, Any]:
    """An object of a request with its fields under the names of their table. What does not act is left out."""
    if not isinstance(given, Mapping):
        raise Refusal(f"'{where}' must be an object.", code="invalid_type", param=where)
    found = camel_case(given, {*fields.honoured, *fields.harmless, *fields.unavailable})
    reading.check(found, fields, where)
    return found


def thought_of(thinking: Mapping[str, Any], reading: Reading) -> tuple[TemplateArgument, ...]:
    """How much is to be thought: a level, or no tokens at all. Other budgets of tokens are hints."""
    where = "generationConfig.thinkingConfig"
    budget = typed(thinking, "thinkingBudget", int, None)
    level = effort_of(thinking, "thinkingLevel", f"{where}.thinkingLevel")
    if budget == 0:
        return (*level, no_thought(f"{where}.thinkingBudget"))
    if budget is not None:
        reading.harmless(f"{where}.thinkingBudget")
    return () if thinking.get("thinkingLevel") == "THINKING_LEVEL_UNSPECIFIED" else level


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings of `generationConfig`."""
    settings = given_settings(config, SETTINGS)
    top_k = settings.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():  # Google's clients have it as one
        settings["top_k"] = int(top_k)
    check_settings(settings)
    return settings


# ---- turns ---------------------------------------------------------------------------------------------------------


def system_of(given: Any, reading: Reading) -> list[Message]:
    """The system message, if there is one."""
    if given is None:
        return []
    where = "systemInstruction"
    text = given if isinstance(given, str) else "".join(_text(part) for part, _ in _parts(given, where, reading))
    return [{"role": "system", "content": text}] if text else []


def _parts(content: Any, where: str, reading: Reading) -> list[tuple[dict[str, Any], str]]:
    """The parts of a turn, each with its place."""
    given = typed(named(content, tables.CONTENT, where, reading), "parts", list, [])
    places = [f"{where}.parts[{index}]" for index in range(len(given))]
    return [(named(part, tables.PART, place, reading), place) for part, place in zip(given, places, strict=True)]


def _text(part: Mapping[str, Any]) -> str:
    return typed(part, "text", str, "")


def messages_of(contents: Any, reading: Reading) -> list[Message]:
    """The turns of a conversation. What the model said in several contents, as a stream's pieces are kept, is one."""
    given = [contents] if isinstance(contents, str | dict) else contents
    if not isinstance(given, list) or not given:
        raise Refusal("'contents' must be a list of turns, and not empty.", code="invalid_value", param="contents")
    messages: list[Message] = []
    spoken: list[tuple[dict[str, Any], str]] = []
    for index, content in enumerate(given):
        where = f"contents[{index}]"
        role = content.get("role") if isinstance(content, dict) else None
        if role == "model":
            spoken += _parts(content, where, reading)
            if index + 1 == len(given) or not _is_models(given[index + 1]):
                messages.append(_assistant(spoken, reading))
                spoken = []
            continue
        if role not in (None, "", "user", "function", "tool", "system"):
            raise Refusal(f"'{where}.role' must be user or model, not {role!r}.", code="invalid_value", param=where)
        messages += _user(content, where, "system" if role == "system" else "user", messages, reading)
    return messages


def _is_models(content: Any) -> bool:
    return isinstance(content, dict) and content.get("role") == "model"


def _user(content: Any, where: str, role: str, before: Sequence[Message], reading: Reading) -> list[Message]:
    """The messages of a user's turn: results of functions are messages of their own, before the text."""
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results: list[Message] = []
    texts: list[str] = []
    calls = list(before[-1].get("tool_calls", ())) if before else []
    for part, place in _parts(content, where, reading):
        if part.get("functionResponse") is not None:
            results.append(_result(part["functionResponse"], f"{place}.functionResponse", calls, reading))
        else:
            texts.append(_text(part))
    text = "".join(texts)
    return [*results, *([{"role": role, "content": text}] if text or not results else [])]


def _result(given: Any, where: str, calls: list[dict[str, Any]], reading: Reading) -> Message:
    """What a function returned. Clients may leave the call's id out; results come in the order of the calls then."""
    given = named(given, tables.RESULT, where, reading)
    name, call_id = required(given, "name", str), typed(given, "id", str, "")
    call = next((c for c in calls if c["id"] == call_id or (not call_id and c["function"]["name"] == name)), None)
    if call is not None:
        calls.remove(call)
        call_id = call["id"]
    returned = given.get("response")
    if isinstance(returned, dict) and len(returned) == 1:  # the names that Google's clients wrap a result in
        returned = returned.get("output", returned.get("result", returned))
    text = returned if isinstance(returned, str) else msgspec.json.encode({} if returned is None else returned).decode()
    return {"role": "tool", "content": text, "tool_call_id": call_id, "name": name}


def answer_of(content: Any, where: str) -> Message:
    """What the model said in one answer, as a neutral message."""
    reading = Reading()
    return _assistant(_parts(content, where, reading), reading)


def _assistant(parts: Sequence[tuple[Mapping[str, Any], str]], reading: Reading) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    signed: str | None = None
    for part, place in parts:
        signed = signed or reasoning_in(part.get("thoughtSignature"))
        if part.get("functionCall") is not None:
            called = named(part["functionCall"], tables.CALL, f"{place}.functionCall", reading)
            called["args"] = unwrapped(called.get("args") or {})
            calls.append(sent_call(called, f"{place}.functionCall", id="id", arguments="args"))
        elif part.get("thought") is True:
            thoughts.append(_text(part))
        else:
            texts.append(_text(part))
    return assistant_message("".join(texts), calls, signed or "".join(thoughts))


# ---- tools, and the form of the answer -----------------------------------------------------------------------------


def tools_of(given: Sequence[Any], reading: Reading) -> ToolSet:
    """The functions that are declared. Tools of Google's own are left out."""
    declared: list[Tool] = []
    places: dict[str, str] = {}
    given_all = True
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        found = named(tool, tables.TOOL, where, reading)
        given_all = given_all and found.keys() <= {"functionDeclarations"}
        for at, one in enumerate(typed(found, "functionDeclarations", list, [])):
            place = f"{where}.functionDeclarations[{at}]"
            declared.append(_declared(named(one, tables.DECLARATION, place, reading), place))
            places[declared[-1]["function"]["name"]] = f"{place}.parameters"
    return ToolSet(declared, places, given_all)


def _declared(given: Mapping[str, Any], where: str) -> Tool:
    described = {"description": given["description"]} if given.get("description") else {}
    parameters = typed(given, "parametersJsonSchema", dict, typed(given, "parameters", dict, {}))
    function = {"name": tool_name(given, where), **described, "parameters": json_schema_of(parameters)}
    return {"type": "function", "function": function}


def calling_of(config: Any, tools: ToolSet, reading: Reading) -> tuple[ToolChoice, dict[str, str]]:
    """Whether functions may or must be called, and those whose arguments must follow their schema whenever they are."""
    where = "toolConfig.functionCallingConfig"
    given = named(config, tables.TOOL_CONFIG, "toolConfig", reading).get("functionCallingConfig") or {}
    calling = named(given, tables.CALLING, where, reading)
    names = [tool["function"]["name"] for tool in tools.declared]
    mode = typed(calling, "mode", str, "AUTO").upper()
    if mode == "NONE":
        return ToolChoice("none"), {}
    if mode not in ("ANY", "VALIDATED"):
        return ToolChoice(), {}
    given_names = typed(calling, "allowedFunctionNames", list, [])
    allowed = [name for name in given_names or names if name in names]
    if not allowed:
        if tools.all_given and (mode == "ANY" or given_names):
            param = f"{where}.allowedFunctionNames"
            raise Refusal(f"'{param}' has no function that 'tools' declares.", code="invalid_value", param=param)
        reading.unavailable(where, "the tools that it asks for were left out")
        return ToolChoice(), {}
    only = tuple(allowed) if len(set(allowed)) < len(names) else ()
    if mode == "ANY":
        return ToolChoice("required", only[0] if len(only) == 1 else None, only), {}
    return ToolChoice("auto", None, only), {name: tools.strict[name] for name in allowed}


_ANYTHING = {"anyOf": [{"type": "object"}, {"type": "array"}]}


def answer_schema_of(config: Mapping[str, Any], reading: Reading) -> AnswerSchema | None:
    """The schema that the answer must follow, wherever it stands."""
    where = "generationConfig"
    for index, one in enumerate(typed(config, "responseFormat", list, [])):
        place = f"{where}.responseFormat[{index}]"
        form = named(one, tables.FORMAT, place, reading)
        if form.get("text") is not None:
            text = named(form["text"], tables.FORMAT_TEXT, f"{place}.text", reading)
            config, where = {"responseMimeType": text.get("mimeType"), **text}, f"{place}.text"
    kind = typed(config, "responseMimeType", str, "")
    names = ("responseJsonSchema", "responseSchema", "jsonSchema", "schema")
    name = next((name for name in names if config.get(name) is not None), None)
    if kind not in ("", "text/plain", "application/json"):
        reading.unavailable(f"{where}.responseMimeType", "answers are text/plain or application/json")
        return None
    if name is None:
        return AnswerSchema(_ANYTHING, f"{where}.responseMimeType") if kind == "application/json" else None
    schema = config[name]
    if not isinstance(schema, dict):
        raise Refusal(f"'{where}.{name}' must be a schema.", code="invalid_type", param=f"{where}.{name}")
    return AnswerSchema(json_schema_of(schema), f"{where}.{name}")


_SNAKE = re.compile(r"_([a-z])")


def camel_case(given: Mapping[str, Any], known: Collection[str] | None = None) -> dict[str, Any]:
    """An object with the names of its own fields in camelCase, or those of them that are `known` so; those of objects
    inside are left as they are.
    """
    renamed = {name: _SNAKE.sub(lambda found: found[1].upper(), name) for name in given}
    return {name if known is not None and renamed[name] not in known else renamed[name]: given[name] for name in given}


_OPENAPI_ONLY = ("nullable", "example", "propertyOrdering")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6", "uuid")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions", "patternProperties")


def json_schema_of(schema: Any) -> Any:
    """A schema in Google's spelling (types in capitals, `nullable`, numbers as text) as a JSON schema."""
    if not isinstance(schema, dict):
        return schema
    given = {"$defs" if name == "defs" else "$ref" if name == "ref" else name: v for name, v in schema.items()}
    if any("_" in name for name in given):
        given = camel_case(given)
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in _MAPS and isinstance(value, dict):
            found[name] = {key: json_schema_of(inner) for key, inner in value.items()}
        elif name in _LISTS and isinstance(value, list):
            found[name] = [json_schema_of(inner) for inner in value]
        elif name in ("items", "additionalProperties", "not"):
            found[name] = json_schema_of(value)
        elif name == "type":
            found |= _type(value)
        elif name in _COUNTS and isinstance(value, str) and (count := whole_number(value)) is not None:
            found[name] = count
        elif name not in _OPENAPI_ONLY and not (name == "format" and value not in _FORMATS):
            found[name] = value
    order = given.get("propertyOrdering")
    if isinstance(order, list) and isinstance(found.get("properties"), dict):
        ordered = {name: found["properties"][name] for name in order if name in found["properties"]}
        found["properties"] = ordered | found["properties"]
    return _or_null(found) if given.get("nullable") is True else found


def _type(value: Any) -> dict[str, Any]:
    names = [str(name).lower() for name in value] if isinstance(value, list) else str(value).lower()
    return {} if names == "type_unspecified" else {"type": names}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    described = {name: schema.pop(name) for name in ("title", "description", "default") if name in schema}
    return {**described, "anyOf": [schema, {"type": "null"}]}
