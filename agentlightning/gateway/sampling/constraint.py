"""What a response must look like: an answer by a schema, a call that is required, or calls of strict tools. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentlightning.gateway.exchange import AnswerSchema, CallRequest, Refusal
from agentlightning.rendering import Rendering, Tool
from agentlightning.rendering.grammar import answer_grammar, schema_problem

_ANYTHING: Mapping[str, Any] = {"type": "object"}
_SIMPLE_BYTES = 4096
_SIMPLE_PARTS = 64
_SIMPLE = frozenset(
    {"type", "properties", "required", "items", "enum", "const", "anyOf", "additionalProperties"}
    | {"$ref", "$defs", "definitions", "title", "description", "default"}
)
"""Keywords of schemas whose grammar is made in a few milliseconds, if they have few parts. Others may say much in few
words: patterns, numbers of times, all of some choices.
"""
_SCHEMAS_BY_NAME = ("properties", "$defs", "definitions")
_VALUES = ("type", "required", "enum")


class FormConstraint(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says of the form of its response."""

    tools: list[Tool] | None
    """Those that may be called, with name and parameters; any parameters where they are not to be enforced."""
    required: bool
    """Whether one must be called."""
    several: bool
    strict: Mapping[str, str] = {}
    schema: AnswerSchema | None = None
    raw: bool = False
    """Whether the response is a text and nothing else, as after a raw prompt: no reasoning, no calls."""


def constraint_of(request: CallRequest) -> FormConstraint | None:
    """None if the response may be anything."""
    choice, tools = request.tool_choice, request.tools if reads_tools(request) else None
    if tools and choice.among:
        tools = [tool for tool in tools if _name(tool) in choice.among]
    if choice.mode == "required":
        meant = [_spare(tool) for tool in tools or () if choice.name in (None, _name(tool))]
        several = request.parallel_tool_calls and choice.name is None
        strict = {_name(tool): request.strict[_name(tool)] for tool in meant if _name(tool) in request.strict}
        return FormConstraint(tools=meant, required=True, several=several, strict=strict)
    if request.schema is not None:
        meant = [_spare(tool) for tool in tools] if tools else None
        strict = request.strict if tools else {}
        return FormConstraint(
            tools=meant,
            required=False,
            several=True,
            strict=strict,
            schema=request.schema,
            raw=request.prompt is not None,
        )
    if tools and (request.strict or choice.among):
        meant = [_spare(tool) if _name(tool) in request.strict else _loose(tool) for tool in tools]
        return FormConstraint(tools=meant, required=False, several=request.parallel_tool_calls, strict=request.strict)
    return None


def encoded(constraint: FormConstraint, most: int) -> bytes:
    """The constraint as bytes. Raises `Refusal` if its schemas are larger than allowed."""
    found = msgspec.msgpack.encode(constraint)
    if len(found) > most:
        raise Refusal(
            f"The JSON schemas that the response must follow have {len(found):,} bytes, more than {most:,} "
            "(schema_bytes).",
            status=413,
            code="schema_too_large",
            param="tools" if constraint.schema is None else constraint.schema.param,
        )
    return found


def is_simple(constraint: FormConstraint, size: int) -> bool:
    """Whether the grammar is made in a few milliseconds, whoever wrote the schemas."""
    if size > _SIMPLE_BYTES:
        return False
    left = [tool["function"]["parameters"] for tool in constraint.tools or ()]
    left += [] if constraint.schema is None else [constraint.schema.value]
    parts = 0
    while left and parts <= _SIMPLE_PARTS:
        schema = left.pop()
        parts += 1
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict) or not _SIMPLE.issuperset(schema):
            return False
        values = [v for name in _VALUES for v in _inside(schema.get(name, []), list)]
        values += [schema.get("const"), schema.get("default")]
        if any(isinstance(value, dict | list) for value in values):  # a $ref may mean what is in there
            return False
        parts += len(values)
        left += [s for name in _SCHEMAS_BY_NAME for s in _inside(schema.get(name, {}), dict)]
        left += _inside(schema.get("anyOf", []), list)
        left += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    return parts <= _SIMPLE_PARTS


def _inside(value: Any, kind: type) -> list[Any]:
    """What is in a value of this kind; the value itself if it is of another."""
    if not isinstance(value, kind):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def grammar_of(constraint: FormConstraint, rendering: Rendering, in_reasoning: bool) -> str | None:
    """The grammar of such a response, for the engine; None if it is free after all. Raises `Refusal`."""
    for tool in constraint.tools or ():
        if _name(tool) in constraint.strict:
            _check(tool["function"]["parameters"], constraint.strict[_name(tool)])
    if constraint.schema is not None:
        _check(constraint.schema.value, constraint.schema.param)
        if constraint.raw:
            return answer_grammar(constraint.schema.value)
        return _answer(constraint.schema, rendering, constraint.tools, in_reasoning)
    required, several = constraint.required, constraint.several
    grammar = rendering.call_grammar(
        constraint.tools or [], in_reasoning=in_reasoning, required=required, several=several
    )
    if grammar is None and required:
        raise Refusal(
            f"tool_choice 'required' and named tools are not supported with the renderer '{rendering.name}'. "
            "Use tool_choice 'auto'.",
            code="unsupported_value",
            param="tool_choice",
        )
    return grammar


def _answer(schema: AnswerSchema, rendering: Rendering, tools: list[Tool] | None, in_reasoning: bool) -> str:
    grammar = rendering.grammar(schema.value, tools, in_reasoning=in_reasoning)
    if grammar is None:
        together = " together with tools" if tools else ""
        raise Refusal(
            f"JSON answers{together} are not supported with the renderer '{rendering.name}'. Ask for JSON in "
            "the prompt, or let the answer be a tool call.",
            code="unsupported_value",
            param=schema.param,
        )
    return grammar


def _check(schema: Any, param: str) -> None:
    """Refuse a schema that cannot be enforced, naming what in it."""
    problem = schema_problem(schema)
    if problem:
        raise Refusal(f"'{param}' cannot be enforced: {problem}", code="unsupported_value", param=param)


def reads_tools(request: CallRequest) -> bool:
    return bool(request.tools) and request.tool_choice.mode != "none"


def _name(tool: Tool) -> str:
    return tool["function"]["name"]


def _spare(tool: Tool) -> Tool:
    """The tool without what a grammar does not need."""
    parameters = tool["function"].get("parameters") or _ANYTHING
    return {"type": "function", "function": {"name": _name(tool), "parameters": parameters}}


def _loose(tool: Tool) -> Tool:
    """The tool with parameters that may be anything."""
    return {"type": "function", "function": {"name": _name(tool), "parameters": _ANYTHING}}
