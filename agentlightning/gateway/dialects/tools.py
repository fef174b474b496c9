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


_KINDS = {
    **dict.fromkeys(("str", "string", "text"), "string"),
    **dict.fromkeys(("int", "integer"), "integer"),
    **dict.fromkeys(("float", "number"), "number"),
    **dict.fromkeys(("bool", "boolean"), "boolean"),
    **dict.fromkeys(("list", "array"), "array"),
    **dict.fromkeys(("dict", "object"), "object"),
}
"""What people write in place of a schema, and the type that it is."""
_OF_SCHEMAS = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const", "items"}


def check_parameters(schema: Any, where: str) -> None:
    """Raises Refusal for parameters that have a kind in place of a schema, as in {"city": "string"}: the model would be
    shown them as they are, and calls would not be held to them. What else is odd in a schema is passed on."""
    if not isinstance(schema, Mapping):
        return
    properties = schema.get("properties")
    named = properties if isinstance(properties, Mapping) else {} if _OF_SCHEMAS & schema.keys() else schema
    for name, kind in named.items():
        if isinstance(kind, str) and (meant := _KINDS.get(kind.lower())) is not None:
            raise Refusal(
                f"'{where}' is no JSON schema: {name!r} has {kind!r}. Write {{'type': 'object', 'properties': "
                f"{{{name!r}: {{'type': {meant!r}}}, …}}, 'required': [{name!r}, …]}}.",
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
