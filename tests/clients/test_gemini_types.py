"""Every field of google-genai's types stands in our table of the Gemini API, so that a new one shows here first."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("google.genai")

from google.genai import types  # pyright: ignore[reportMissingImports]

from agentlightning.gateway.dialects.base import Fields
from agentlightning.gateway.dialects.gemini.requests import camel_case, json_schema_of
from agentlightning.gateway.dialects.tables import gemini as tables
from agentlightning.rendering.grammar import schema_problem

pytestmark = pytest.mark.clients

OF_THE_CLIENT = {
    "httpOptions",
    "shouldReturnHttpResponse",
    "automaticFunctionCalling",
    "automaticContinuation",
    "config",
}
"""Settings of the client that are never sent."""
TABLES: list[tuple[str, tuple[Fields, ...]]] = [
    ("_GenerateContentParameters", (tables.FIELDS,)),
    ("GenerateContentConfig", (tables.FIELDS, tables.GENERATION)),
    ("GenerationConfig", (tables.GENERATION,)),
    ("CountTokensConfig", (tables.FIELDS,)),
    ("ThinkingConfig", (tables.THINKING,)),
    ("Content", (tables.CONTENT,)),
    ("Part", (tables.PART,)),
    ("FunctionCall", (tables.CALL,)),
    ("FunctionResponse", (tables.RESULT,)),
    ("Tool", (tables.TOOL,)),
    ("FunctionDeclaration", (tables.DECLARATION,)),
    ("ToolConfig", (tables.TOOL_CONFIG,)),
    ("FunctionCallingConfig", (tables.CALLING,)),
    ("ResponseFormat", (tables.FORMAT,)),
    ("TextResponseFormat", (tables.FORMAT_TEXT,)),
]


def names_of(type_name: str) -> set[str]:
    """The fields of a type by the names that they are sent under."""
    return set(camel_case(getattr(types, type_name).model_fields))


@pytest.mark.parametrize(("name", "fields"), TABLES)
def test_every_field_is_in_a_table(name: str, fields: tuple[Fields, ...]) -> None:
    listed = {one for table in fields for one in (*table.honoured, *table.harmless, *table.unavailable)}
    assert names_of(name) - listed - OF_THE_CLIENT == set()


def test_all_calling_modes_are_known() -> None:
    assert {mode.value for mode in types.FunctionCallingConfigMode} == {
        *("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")
    }


def test_a_schema_of_the_clients_own_can_be_enforced() -> None:
    """One that has every kind of thing a Schema can say, as the client writes it."""
    given = types.Schema(
        type=types.Type.OBJECT,
        properties={
            "word": types.Schema(type=types.Type.STRING, enum=["a", "b"], format="enum"),
            "many": types.Schema(type=types.Type.ARRAY, items=types.Schema(type=types.Type.INTEGER), min_items=1),
            "none": types.Schema(type=types.Type.NUMBER, nullable=True, format="double"),
            "either": types.Schema(any_of=[types.Schema(type=types.Type.BOOLEAN), types.Schema(type=types.Type.NULL)]),
        },
        required=["word"],
        property_ordering=["many", "word", "none", "either"],
    )
    sent: dict[str, Any] = given.model_dump(mode="json", by_alias=True, exclude_none=True)
    found = json_schema_of(sent)
    assert schema_problem(found) is None
    assert list(found["properties"]) == ["many", "word", "none", "either"]
