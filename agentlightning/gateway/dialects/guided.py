"""What vLLM's and SGLang's clients ask of an answer's form, in all their spellings, as the schema of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from agentlightning.gateway.dialects.fields import Reading
from agentlightning.gateway.dialects.tables.common import GUIDED, STRUCTURED
from agentlightning.gateway.exchange import AnswerSchema, Refusal
from agentlightning.rendering.grammar import TEXT_KEY

_LONGEST = 512 * 1024
"""Characters of a regular expression or a grammar."""


def guided_schema(body: Mapping[str, Any], reading: Reading) -> AnswerSchema | None:
    """The form of the answer, if one of these fields asks for it. Raises `Refusal` for an invalid value."""
    for name, kind in GUIDED.items():
        if body.get(name) is not None:
            return _form(kind, body[name], name)
    given = body.get("structured_outputs")
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _wrong("structured_outputs", "an object")
    reading.check(given, STRUCTURED, "structured_outputs")
    for kind in ("json", "regex", "choice", "grammar"):
        if given.get(kind) is not None:
            return _form(kind, given[kind], f"structured_outputs.{kind}")
    return AnswerSchema({"type": "object"}, "structured_outputs.json_object") if given.get("json_object") else None


def _form(kind: str, value: Any, where: str) -> AnswerSchema:
    if kind == "json":
        return AnswerSchema(_schema(value, where), where)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(v, str | int) for v in value):
            raise _wrong(where, "a list of texts")
        return AnswerSchema({TEXT_KEY: {kind: [str(v) for v in value]}}, where)
    if not isinstance(value, str) or not value or len(value) > _LONGEST:
        raise _wrong(where, f"a text of at most {_LONGEST:,} characters")
    return AnswerSchema({TEXT_KEY: {kind: value}}, where)


def _schema(value: Any, where: str) -> Mapping[str, Any]:
    """A JSON schema, as it is or written as a text."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            raise _wrong(where, "a JSON schema") from None
    if not isinstance(value, Mapping):
        raise _wrong(where, "a JSON schema")
    return value


def _wrong(where: str, what: str) -> Refusal:
    return Refusal(f"'{where}' must be {what}.", code="invalid_type", param=where)
