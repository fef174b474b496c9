"""Tools that are no plain functions, as functions: those of a namespace by a longer name, those that take a free text
by one argument, `input`. A model knows functions; clients get the calls back in the form that they declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from agentlightning.gateway.dialects.fields import typed
from agentlightning.gateway.exchange import Refusal, ToolCall
from agentlightning.rendering.messages import Tool

INPUT = "input"


class Origin(NamedTuple):
    """How a client declared a tool that the model knows as a function of some name."""

    kind: str
    """"function" or "custom"."""
    name: str
    namespace: str | None = None


Origins = Mapping[str, Origin]
"""By the name that the model knows, where that or the kind is another."""


def origin_of(call: ToolCall, origins: Mapping[str, Any]) -> Origin:
    """The tool that is called, as its client knows it."""
    found = origins.get(call.name)
    return Origin("function", call.name) if found is None else Origin(*found)


def flat_name(namespace: Any, name: Any) -> Any:
    """The name of a function that is in a namespace, or in none."""
    if not isinstance(namespace, str) or not namespace or not isinstance(name, str):
        return name
    return namespace + ("" if namespace.endswith("_") else "__") + name


_OF_SCHEMAS = {
    *(
        "type",
        "properties",
        "required",
        "items",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "then",
        "else",
    ),
    *("definitions", "description", "title", "default", "examples", "nullable", "additionalProperties"),
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
}


def check_parameters(schema: Any, where: str) -> None:
    """Raises Refusal for parameters that name their kinds in place of a JSON schema: a model is shown them as they are,
    and calls are not held to them."""
    if not isinstance(schema, Mapping) or not schema:
        return
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else schema
    if named is schema and any(key in _OF_SCHEMAS or str(key).startswith("$") for key in schema):
        return
    if named is schema or any(not isinstance(value, Mapping | bool) for value in named.values()):
        first = next((key for key in named if not isinstance(named[key], Mapping)), next(iter(named)))
        raise Refusal(
            f"'{where}' is no JSON schema: {first!r} has {named[first]!r:.40}. Write {{'type': 'object', 'properties': "
            f"{{{first!r}: {{'type': 'integer'}}, …}}, 'required': [{first!r}, …]}}. Types are string, number, "
            "integer, boolean, array and object.",
            code="invalid_function_parameters",
            param=where,
        )


def text_function(name: str, tool: Mapping[str, Any]) -> Tool:
    """The function for a tool that takes a free text. The text's grammar, if any, is described to the model."""
    argument = {"type": "string"}
    given = typed(tool, "format", dict, {})
    grammar = typed(given, "grammar", dict, given)
    if isinstance(definition := grammar.get("definition"), str):
        argument["description"] = f"A text by this {grammar.get('syntax') or ''} grammar:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT: argument}, "required": [INPUT]}
    described = {"description": tool["description"]} if isinstance(tool.get("description"), str) else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def text_of_call(arguments: str) -> str:
    """The free text in a call's arguments; all of them where the model wrote something else."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if isinstance(found, dict) and found.keys() == {INPUT} and isinstance(found[INPUT], str):
        return found[INPUT]
    return arguments


def arguments_of_text(text: Any) -> Any:
    """The arguments that `text_of_call` takes a text from."""
    return {INPUT: text} if isinstance(text, str) else text
