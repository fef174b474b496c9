"""Responses that follow a JSON schema, in the answer or in a tool call: their grammar, for the engine. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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


class CallForm(msgspec.Struct, frozen=True):
    """How a format writes tool calls whose arguments are JSON, in the terms of a grammar."""

    call: str
    """The rule of one call; `inside` is its tool's name and arguments."""
    opening: str
    """What of `inside` comes before the arguments; NAME is the tool's name."""
    closing: str
    """What comes after them."""
    thought: str | None = None
    """The rule of reasoning before a call, where the markers do not say it."""
    prose: str | None = None
    """The regular expression of a text that is no call; None if it is not known."""
    several: bool = True
    """Whether a response may hold more than one call."""


def hermes_form(markers: Markers) -> CallForm:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen's models write."""
    return CallForm(
        call=f"SPACE <[{markers.tool_open}]> SPACE inside SPACE <[{markers.tool_close}]>",
        opening=json.dumps('{"name": NAME, "arguments":') + " SPACE",
        closing='SPACE "}"',
        prose=r"/(.|\n)*/ & ~/(.|\n)*<tool_call>(.|\n)*/",
    )


BARE_FORM = CallForm(
    call="inside",
    opening=json.dumps('{"name": NAME, "parameters":') + " SPACE",
    closing='SPACE "}"',
    prose=r"/([ \n]*[^{ \n](.|\n)*)?/",
    several=False,
)
"""The whole response is `{"name": …, "parameters": …}`, as Llama 3 writes."""


def harmony_form(token: Callable[[str], int]) -> CallForm:
    """A message on the commentary channel to the function, perhaps after one on the analysis channel (GPT-OSS)."""
    start, end, channel, message, constrain, call = (
        f"<[{token(f'<|{name}|>')}]>" for name in ("start", "end", "channel", "message", "constrain", "call")
    )
    return CallForm(
        call=f"{channel} inside",
        opening=f'"commentary to=functions." NAME " " {constrain} "json" {message}',
        closing=call,
        thought=f'{channel} "analysis" {message} TEXT {end} {start} "assistant"',
        several=False,
    )


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
    rules.append(f"answer: %json {_compiled(schema)}")
    if tools and markers.tool_open is not None and markers.tool_close is not None:
        rules.append("body: answer | call+")
        free = f"SPACE <[{markers.tool_open}]> SPACE TEXT SPACE <[{markers.tool_close}]>"
        rules += [f"call: {free}"] if form is None else _calls(tools, form)
    else:
        rules.append("body: answer")
    return _grammar(start, rules)


def call_grammar(
    tools: Sequence[Tool], form: CallForm, markers: Markers, *, in_reasoning: bool, required: bool, several: bool
) -> str | None:
    """The grammar of a response that calls one of `tools` (or, unless it is `required`, says anything else), with
    arguments by the tool's schema; None if the form does not say what is no call.
    """
    start, rules = _reasoning(markers, in_reasoning)
    if form.thought is not None:
        start, rules = ["thought?"], [f"thought: {form.thought}"]
    more = " call*" if several and form.several else ""
    if required:
        rules.append(f"body: call{more}")
    elif form.prose is None:
        return None
    else:
        rules += [f"body: PROSE (call{more})? | call{more}" if form.several else "body: PROSE | call"]
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


def _calls(tools: Sequence[Tool], form: CallForm) -> list[str]:
    """The rule `call`; arguments whose schema cannot be enforced are any object."""
    rules = [f"call: {form.call}", "inside: " + " | ".join(f"inside_{n}" for n in range(len(tools)))]
    for n, tool in enumerate(tools):
        function = tool["function"]
        parameters = function.get("parameters") or {}
        if parameters.get("type") != "object" or _problem(json.dumps(parameters)):
            parameters = {"type": "object"}
        rules.append(
            f"inside_{n}: {_named(form.opening, function['name'])} %json {_compiled(parameters)} {form.closing}"
        )
    return rules


def _named(opening: str, name: str) -> str:
    """The opening of a call of this tool; inside a JSON text its name is a JSON string."""
    if "{" in opening:
        return opening.replace("NAME", json.dumps(json.dumps(name))[1:-1])
    return opening.replace("NAME", json.dumps(name))


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
