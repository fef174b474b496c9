"""Responses that follow a JSON schema, in the answer or in a tool call: their grammar, for the engine. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentlightning.errors import missing_extra
from agentlightning.rendering.forms import NO_MARKERS, CallForm, Markers, Tags
from agentlightning.rendering.messages import Tool

_COMPILE = {"coerce_one_of": True, "whitespace_pattern": "[ \\n]{0,40}"}
"""oneOf as anyOf, which is how typed unions come out of most libraries; and no endless white space between values."""


TEXT_KEY = "x-agl-text"
"""A schema with this key is of an answer that is a bare text and no JSON: by a regular expression ("regex"), one of
some texts ("choice"), or by a grammar ("grammar", lark's or EBNF's). Its value is one of these with what it is.
"""
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
"""Keywords by which a schema says itself what other properties there may be."""


def schema_problem(schema: Any) -> str | None:
    """What in a schema cannot be enforced; None if all of it can."""
    if not isinstance(schema, Mapping):
        return "it is not an object."
    try:
        return _matcher().validate_grammar(_lark("\n".join(["start: answer", *_answer(schema)]))) or None
    except RecursionError:
        return "it is nested too deep."
    except _UnreadableError as error:
        return str(error)


def answer_grammar(
    schema: Mapping[str, Any],
    markers: Markers = NO_MARKERS,
    *,
    in_reasoning: bool = False,
    tools: Sequence[Tool] | None = None,
    form: CallForm | None = None,
) -> str:
    """The grammar of a response: reasoning if the model likes (its end, if the prompt ends inside), then an answer by
    the schema or calls of `tools`. What is inside a call is held to the tools' own schemas where calls are written as
    `form` says, and free otherwise.
    """
    start, rules = _reasoning(markers, in_reasoning)
    rules += _answer(schema)
    if tools and markers.tool_open is not None and markers.tool_close is not None:
        free = f"call: SPACE <[{markers.tool_open}]> SPACE TEXT SPACE <[{markers.tool_close}]>"
        rules.append("body: answer | " + ("call+" if form is None else _all("call+", form)))
        rules += [free] if form is None else _calls(tools, form)
    else:
        rules.append("body: answer")
    return _grammar(start, rules)


def _answer(schema: Mapping[str, Any]) -> list[str]:
    """The rules of an answer by a schema, or by what stands under `TEXT_KEY` in its place."""
    given = schema.get(TEXT_KEY)
    if not isinstance(given, Mapping):
        return [f"answer: %json {_compiled(schema)}"]
    if "choice" in given:
        return ["answer: " + " | ".join(json.dumps(str(text)) for text in given["choice"])]
    if "regex" in given:
        return ["answer: ANSWER", "ANSWER: /" + re.sub(r"(?<!\\)/", r"\/", str(given["regex"])) + "/"]
    inner = _as_lark(str(given.get("grammar"))).replace("%llguidance {}", "")
    return [f"answer: %lark {{\n{inner}\n}}"]


def call_grammar(
    tools: Sequence[Tool], form: CallForm, markers: Markers, *, in_reasoning: bool, required: bool, several: bool
) -> str | None:
    """The grammar of a response that calls one of `tools` (or, unless it is `required`, says anything else), with
    arguments by the tool's schema; None if the form does not say what is no call.
    """
    start, rules = _reasoning(markers, in_reasoning)
    if form.thought is not None:
        start, rules = ["thought?"], [f"thought: {form.thought}"]
    elif form.thought_end is not None and in_reasoning and markers.think_close is None:
        start, rules = ["thought"], [f"thought: {form.thought_end}"]
    calls = _all("call+" if several and form.several else "call", form)
    if required:
        rules.append(f"body: {calls}")
    elif form.prose is None:
        return None
    else:
        rules += [f"body: PROSE ({calls})? | {calls}" if form.several else "body: PROSE | call"]
        rules.append(f"PROSE: {form.prose}")
    return _grammar(start, [*rules, *_calls(tools, form)])


def _reasoning(markers: Markers, in_reasoning: bool) -> tuple[list[str], list[str]]:
    """What a response begins with, and the rules for it."""
    close = f"TEXT <[{markers.think_close}]> SPACE"
    if markers.think_close is None:
        return [], []
    if in_reasoning:
        return ["reasoning"], [f"reasoning: {close}"]
    if markers.think_open is None:
        return [], []
    return ["reasoning?"], [f"reasoning: <[{markers.think_open}]> {close}"]


def _all(calls: str, form: CallForm) -> str:
    """All calls of a response, with what stands around them."""
    return f"{form.around[0]} {calls} {form.around[1]}".strip()


def _calls(tools: Sequence[Tool], form: CallForm) -> list[str]:
    """The rule `call`; arguments whose schema cannot be enforced are any object."""
    rules = [f"call: {form.call}", "inside: " + " | ".join(f"inside_{n}" for n in range(len(tools)))]
    for n, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") or {}
        if not isinstance(parameters, Mapping) or parameters.get("type") != "object" or schema_problem(parameters):
            parameters = {"type": "object"}
        arguments = f"%json {_compiled(parameters)}"
        if form.tags is not None:
            arguments = f"arguments_{n}"
            rules += tagged_arguments(arguments, parameters, form.tags)
        rules.append(f"inside_{n}: {_named(form.opening, function['name'])} {arguments} {form.closing}")
    return rules


def _named(opening: str, name: str) -> str:
    """The opening of a call of this tool; inside a JSON text its name is a JSON string."""
    if "{" in opening:
        return opening.replace("NAME", json.dumps(json.dumps(name))[1:-1])
    return opening.replace("NAME", json.dumps(name))


# ---- arguments one by one --------------------------------------------------------------------------------------------

_EDGE = r"[^\s\x00-\x1f]"
"""What a text begins and ends with: who reads it strips it."""
_NAME = "/[A-Za-z_][A-Za-z0-9_]{0,63}/"


def tagged_arguments(rule: str, parameters: Mapping[str, Any], tags: Tags) -> list[str]:
    """The rules of arguments that are written one by one, in the order of the schema, required ones at least; any
    arguments where the schema lists none. Each is held to its own schema; conditions between several are not.
    """
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        if parameters.get("additionalProperties") is False:
            return [f'{rule}: ""']
        return [f"{rule}: {rule}_any*", *_tagged(f"{rule}_any", None, {}, {}, tags)]
    required = set(parameters.get("required") or ())
    shared = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}
    parts, rules = list[str](), list[str]()
    for n, (key, schema) in enumerate(properties.items()):
        parts.append(f"{rule}_{n}" + ("" if key in required else "?"))
        rules += _tagged(f"{rule}_{n}", key, schema, shared, tags)
    return [f"{rule}: {' '.join(parts)}", *rules]


def _tagged(rule: str, key: str | None, schema: Any, shared: Mapping[str, Any], tags: Tags) -> list[str]:
    """One argument; any name where `key` is None. `shared` are definitions that its schema may refer to."""
    schema = schema if isinstance(schema, dict) else {}
    name = f"{rule}_NAME".upper() if key is None else json.dumps(key)
    rules = [f"{name}: {_NAME}"] if key is None else []
    is_text = schema.get("type") in ("string", ["string"])
    opening = tags.opening.replace("KEY", name).replace("STRING", "true" if is_text else "false")
    if not is_text:
        return [*rules, f"{rule}: {opening} %json {_compiled({**schema, **shared})} {tags.closing}"]
    if "enum" in schema or "const" in schema:
        values = [v for v in schema.get("enum", [schema.get("const")]) if isinstance(v, str)]
        return [*rules, f"{rule}: {opening} ({' | '.join(map(json.dumps, values))}) {tags.closing}"]
    text = f"{rule}_TEXT".upper()
    return [*rules, f"{rule}: {opening} {text} {tags.closing}", f"{text}: {_text(schema, tags.never)}"]


def _text(schema: Mapping[str, Any], never: Sequence[str]) -> str:
    """The regular expression of a text by its schema's length and pattern, without what it may never contain."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    most = math.inf if most is None else most
    parts = [""] if least == 0 else []
    if least <= 1 <= most:
        parts.append(_EDGE)
    if most >= 2:
        inner = f"{max(0, least - 2)},{'' if most == math.inf else most - 2}"
        parts.append(rf"{_EDGE}(.|\n){{{inner}}}{_EDGE}")
    without = "".join(rf" & ~/(.|\n)*{_escaped(word)}(.|\n)*/" for word in never)
    whole = f"/({'|'.join(parts)})/{without}"
    if (pattern := schema.get("pattern")) and not _wrong(narrow := f"{whole} & {_searched(pattern)}"):
        return narrow
    return whole


def _searched(pattern: str) -> str:
    """The regular expression of a whole text in which JSON Schema's pattern is found somewhere."""
    whole = []
    for branch in _branches(re.sub(r"(?<!\\)/", r"\/", pattern)):
        ends = branch.endswith("$") and not branch.endswith("\\$")
        inner = branch.removeprefix("^")[: -1 if ends else None]
        whole.append(("" if branch.startswith("^") else r"(.|\n)*") + f"({inner})" + ("" if ends else r"(.|\n)*"))
    return f"/({'|'.join(whole)})/"


def _branches(pattern: str) -> list[str]:
    """A pattern's alternatives, those that no bracket holds."""
    found, depth, escaped = [""], 0, False
    for character in pattern:
        depth += 0 if escaped else (character in "([") - (character in ")]")
        if character == "|" and not depth and not escaped:
            found.append("")
        else:
            found[-1] += character
        escaped = character == "\\" and not escaped
    return found


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("<", r"\x3c")


def _wrong(regex: str) -> str:
    return _matcher().validate_grammar(_lark(f"start: TEXT\nTEXT: {regex}"))


def _grammar(start: Sequence[str], rules: Sequence[str]) -> str:
    words = ["TEXT: /(.|\\n)*/", "SPACE: /[ \\n]{0,8}/"]
    return _lark("\n".join([f"start: {' '.join([*start, 'body'])}", *rules, *words]))


def _compiled(schema: Mapping[str, Any]) -> str:
    text = json.dumps(schema)
    # Parts of an allOf share their object, so that none of them may close it.
    return json.dumps({**(schema if '"allOf"' in text else _closed(schema)), "x-guidance": _COMPILE})


def _closed(schema: Any) -> Any:
    """The schema with objects that list their properties and say nothing of others closed to others: whatever follows
    it follows the original, and a small model does not add properties without end.
    """
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in ("const", "enum", "default", "examples") else _closed(value)
        for key, value in schema.items()
    }
    if isinstance(found.get("properties"), dict) and not any(key in found for key in _OPEN):
        found["additionalProperties"] = False
    return found


class _UnreadableError(Exception):
    """A grammar is neither lark's nor EBNF."""


def _as_lark(grammar: str) -> str:
    """A grammar of either kind as one of lark's. Raises `_UnreadableError`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # its reader raises that very class for rules that are not there
        raise _UnreadableError(f"it is no grammar: {error}") from error


def _lark(text: str) -> str:
    return _matcher().grammar_from_lark(text)


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise missing_extra("torch", "llguidance") from error
    return LLMatcher
