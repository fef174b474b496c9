"""Answers that follow a JSON schema: the grammar of a whole response, for the engine. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from agentlightning.errors import missing_extra
from agentlightning.rendering.messages import Tool

_COMPILE = {"coerce_one_of": True, "whitespace_pattern": "[ \\n]{0,40}"}
"""oneOf as anyOf, which is how typed unions come out of most libraries; and no endless white space between values."""


_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
"""Keywords by which a schema says itself what other properties there may be."""


class Markers(msgspec.Struct, frozen=True):
    """Single tokens that open and close reasoning and tool calls, as far as the vocabulary has them."""

    think_open: int | None
    think_close: int | None
    tool_open: int | None
    tool_close: int | None


NO_MARKERS = Markers(None, None, None, None)


def schema_problem(schema: Mapping[str, Any]) -> str | None:
    """What in a schema cannot be enforced; None if all of it can."""
    try:
        return _problem(json.dumps(schema)) or None
    except RecursionError:
        return "it is nested too deep."


def answer_grammar(
    schema: Mapping[str, Any],
    markers: Markers = NO_MARKERS,
    *,
    in_reasoning: bool = False,
    tools: Sequence[Tool] | None = None,
    calls_in_json: bool = False,
) -> str:
    """The grammar of a response: reasoning if the model likes (its end, if the prompt ends inside), then an answer by
    the schema or calls of `tools`. What is inside a call is held to the tools' own schemas where calls are written as
    `{"name": …, "arguments": …}`, and free otherwise.
    """
    start, rules = ["body"], [f"answer: %json {_compiled(schema)}"]
    if markers.think_close is not None:
        close = f"TEXT <[{markers.think_close}]> SPACE"
        if in_reasoning:
            start.insert(0, "reasoning")
            rules.append(f"reasoning: {close}")
        elif markers.think_open is not None:
            start.insert(0, "reasoning?")
            rules.append(f"reasoning: <[{markers.think_open}]> {close}")
    if tools and markers.tool_open is not None and markers.tool_close is not None:
        rules.append("body: answer | call+")
        rules.append(f"call: SPACE <[{markers.tool_open}]> SPACE inside SPACE <[{markers.tool_close}]>")
        rules += _calls_in_json(tools) if calls_in_json else ["inside: TEXT"]
    else:
        rules.append("body: answer")
    rules += ["TEXT: /(.|\\n)*/", "SPACE: /[ \\n]{0,8}/"]
    return _lark("\n".join([f"start: {' '.join(start)}", *rules]))


def _calls_in_json(tools: Sequence[Tool]) -> list[str]:
    """The rule `inside`: a call of one of the tools; arguments whose schema cannot be enforced are any object."""
    rules = ["inside: " + " | ".join(f"inside_{n}" for n in range(len(tools)))]
    for n, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") or {}
        if parameters.get("type") != "object" or _problem(json.dumps(parameters)):
            parameters = {"type": "object"}
        opening = json.dumps(f'{{"name": {json.dumps(function["name"])}, "arguments":')
        rules.append(f'inside_{n}: {opening} SPACE %json {_compiled(parameters)} SPACE "}}"')
    return rules


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


@lru_cache(maxsize=256)
def _problem(schema: str) -> str:
    matcher = _matcher()
    return matcher.validate_grammar(_lark(f"start: %json {_compiled(json.loads(schema))}"))


def _lark(text: str) -> str:
    return _matcher().grammar_from_lark(text)


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise missing_extra("torch", "llguidance") from error
    return LLMatcher
