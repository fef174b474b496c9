"""Schemas as Google's APIs spell them, after OpenAPI 3.0, and their names: as JSON schemas, which others read. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from agentlightning.reading import whole_number

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
