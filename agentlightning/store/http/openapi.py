"""The OpenAPI document of the table's operations, and the page that shows it to people."""

from __future__ import annotations

import re
from functools import cache
from html import escape
from typing import Any

import msgspec
from pydantic import TypeAdapter

from agentlightning.store.http.problems import PROBLEM, TITLES
from agentlightning.store.http.table import OPERATIONS, HttpOperation, Named
from agentlightning.store.http.wire import Problem
from agentlightning.types import Resource

_REF = "#/components/schemas/{}"
_BINARY = {"type": "string", "format": "binary"}
_STYLE = "body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{overflow:auto}"


@cache
def document() -> dict[str, Any]:
    """The document as JSON values."""
    records: dict[str, TypeAdapter[Any]] = {"": TypeAdapter(Problem)}

    def of_record(kind: Any) -> dict[str, Any]:
        if kind is Named:
            return {"type": "object", "additionalProperties": of_record(Resource)}
        records[kind.__name__] = TypeAdapter(kind)
        return {"$ref": _REF.format(kind.__name__)}

    with_body = [one for one in OPERATIONS if one.body not in (None, bytes)]
    bodies, components = msgspec.json.schema_components(
        [one.body for one in with_body], schema_hook=of_record, ref_template=_REF.replace("{}", "{name}")
    )
    body_of = dict(zip(with_body, bodies, strict=True))
    answers = {one: one.answers for one in OPERATIONS if one.answer not in (None, bytes)}
    kinds: list[Any] = [(key, "validation", one) for key, one in {**records, **answers}.items()]
    schemas, definitions = TypeAdapter.json_schemas(kinds, ref_template=_REF.replace("{}", "{model}"))
    components |= definitions.get("$defs", {})
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        answer = schemas.get((one, "validation"))
        paths.setdefault(one.path, {})[one.verb.lower()] = _described(one, body_of.get(one), answer, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Agent Lightning store", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(one: HttpOperation, body: Any, answer: Any, components: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in one.ids]
    operation: dict[str, Any] = {"operationId": f"{one.name}_{one.verb.lower()}", "summary": one.summary}
    if one.body is not None and one.verb == "GET":
        query = components[one.body.__name__]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    elif one.body is not None:
        operation["requestBody"] = {"required": True, "content": {one.takes: {"schema": body or _BINARY}}}
    if parameters:
        operation["parameters"] = parameters
    good = {"description": "Done"} if one.answer is None else _content(one.gives, answer or _BINARY, "As wanted")
    problems = {str(code): _content(PROBLEM, {"$ref": _REF.format("Problem")}, TITLES[code]) for code in _PROBLEMS}
    operation["responses"] = {"204" if one.answer is None else "200": good, **problems}
    return operation


_PROBLEMS = (404, 409, 422, 503)


def _content(media: str, schema: Any, description: str) -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": schema}}}


def page() -> str:
    """For people: each operation with what it takes and gives."""
    whole = document()
    parts = [
        f"<h3><code>{verb.upper()} {escape(path)}</code></h3><p>{escape(operation['summary'])}</p>"
        f"<details><summary>Details</summary><pre>{_shown(operation)}</pre></details>"
        for path, verbs in whole["paths"].items()
        for verb, operation in verbs.items()
    ]
    parts += [
        f'<h3 id="{escape(name)}">{escape(name)}</h3><pre>{_shown(schema)}</pre>'
        for name, schema in whole["components"]["schemas"].items()
    ]
    title = whole["info"]["title"]
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return f"{head}<h1>{title}</h1>{''.join(parts)}"


def _shown(value: Any) -> str:
    text = escape(msgspec.json.format(msgspec.json.encode(value)).decode(), quote=False)
    return re.sub(r"#/components/schemas/([\w\[\]]+)", r'<a href="#\1">\1</a>', text)
