"""Requests of all wire formats for `scripts/fuzz.py`: whole ones, changed in their structure as often as not.

What a change puts in is of the formats too: their own fields, the words of their enumerations, parts of one format in
another, schemas that are drawn from a grammar, and texts that mean something to a template, a tokenizer or a parser.
All of it follows from one seed.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

CALC: dict[str, Any] = {
    "name": "calc",
    "description": "One binary operation.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
BODIES: dict[str, dict[str, Any]] = {
    "/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "r",
                "tool_calls": [{"id": "a", "type": "function", "function": {"name": "calc", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "a", "content": "5"},
        ],
        "tools": [{"type": "function", "function": CALC}],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        **{"n": 2, "temperature": 1, "top_p": 0.5, "max_tokens": 20, "stop": ["a"], "seed": 1, "logprobs": True},
        **{"top_logprobs": 2, "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}},
    },
    "/responses": {
        "model": "policy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "What is 2 + 3?"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": []},
            {"type": "function_call", "call_id": "c", "name": "calc", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "5"},
        ],
        "instructions": "i",
        "tools": [{"type": "function", **CALC}],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
        **{"max_output_tokens": 20, "temperature": 1, "store": True, "stream": False, "previous_response_id": None},
        **{"include": ["message.output_text.logprobs"], "truncation": "disabled", "top_logprobs": 1},
    },
    "/messages": {
        "model": "policy",
        "max_tokens": 20,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "tool_use", "id": "a", "name": "calc", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "5"}]},
        ],
        "tools": [{"name": "calc", "input_schema": CALC["parameters"], "description": "d"}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "stream": False,
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    },
    "/completions": {
        **{"model": "policy", "prompt": ["x"], "n": 1, "logprobs": 2, "max_tokens": 20, "stop": "x", "echo": False},
        **{"stream": False, "suffix": None, "temperature": 0.5},
    },
    "/models/policy:generateContent": {
        "contents": [
            {"role": "user", "parts": [{"text": "What is 2 + 3?"}]},
            {"role": "model", "parts": [{"text": "r", "thought": True}, {"text": "z", "thoughtSignature": "eA=="}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "calc", "args": {"a": 1}}}]},
            {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "calc", "response": {"result": "5"}}}]},
        ],
        "systemInstruction": {"parts": [{"text": "s"}]},
        "tools": [{"functionDeclarations": [CALC]}],
        "toolConfig": {"functionCallingConfig": {"mode": "AUTO", "allowedFunctionNames": ["calc"]}},
        "generationConfig": {
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5},
            "responseMimeType": "application/json",
            "responseSchema": SCHEMA,
            **{"temperature": 1, "topP": 0.5, "topK": 3, "maxOutputTokens": 20, "stopSequences": ["a"], "seed": 1},
            **{"candidateCount": 1, "responseLogprobs": True, "logprobs": 2},
        },
    },
}
"""A request that says much, of each wire format, by its path."""
OTHER_PATHS = {
    "/messages": ("/messages/count_tokens",),
    "/models/policy:generateContent": (
        "/models/policy:streamGenerateContent",
        "/models/policy:streamGenerateContent?alt=sse",
        "/models/policy:countTokens",
    ),
}
"""What takes the same bodies."""
TEXTS = (
    *("", " ", "\n", "\0", "\x1b[2J", "<|im_start|>", "<|im_end|>\n<|im_start|>system\n", "<think>", "</think>x"),
    *("<tool_call>", '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>', "<tool_response>", "{{ 7 * 7 }}"),
    *(
        "{% for i in range(9**9) %}",
        "e\u0301\u0301",
        "\u202e\u200d\ufeff",
        "\U0001f469\u200d\U0001f680",
        "\ud800",
        "ẞ" * 99,
    ),
    *("a" * 10_000, "ab " * 5_000, "💥" * 3_000, "(a+)+$", "[", "\\", '"', "data:image/png;base64,AAAA", "../../x"),
)
NUMBERS = (0, -1, 1, 2, 128, 2**31, 2**63, 2**64, 10**30, 0.5, -0.0, 1e-40, 1e308, -1e308)
KEYWORDS = (
    *("type", "properties", "items", "required", "enum", "const", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs"),
    *("pattern", "format", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "multipleOf"),
    *("additionalProperties", "patternProperties", "propertyNames", "prefixItems", "if", "then", "else", "nullable"),
    *("dependentSchemas", "unevaluatedProperties", "contains", "uniqueItems", "minProperties", "$dynamicRef"),
)
PATTERNS = (
    "^a+$",
    "(a|b)*c{2,30}",
    "[",
    "(?=x)",
    "\\d{4}-\\d{2}",
    "^(a+)+$",
    "(?<n>a)\\k<n>",
    "\\p{L}+",
    "",
    "a{1000}",
)
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null", "OBJECT", "any", ["string", "null"], 5)
MOST_BYTES = 200_000
"""Of a request here; larger ones are in `benchmarks/neighbours.py`."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all that a value holds."""
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


class Grammar:
    """Draws requests. `fields`: names of the wire formats' fields, put where others are."""

    def __init__(self, seed: int, fields: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self._chance = random.Random(seed)
        self._fields = dict(fields or {})
        self._parts = [at(body, path) for body in BODIES.values() for path in places(body)]
        self._words = sorted({part for part in self._parts if isinstance(part, str)})
        self._names = sorted(
            {path[-1] for body in BODIES.values() for path in places(body) if isinstance(path[-1], str)}
        )

    def request(self, answered: str | None = None) -> tuple[str, bytes]:
        """A path and a body; it may go on from the response `answered`."""
        pick = self._chance
        path = pick.choice(list(BODIES))
        body = copy.deepcopy(BODIES[path])
        for name in pick.sample(sorted(body), pick.randint(0, len(body) // 2)):
            if name not in ("model", "messages", "input", "contents", "prompt", "max_tokens"):
                del body[name]
        if "previous_response_id" in body and answered is not None:
            body["previous_response_id"] = answered
        try:
            for _ in range(pick.choice((0, 1, 1, 1, 2, 3, 6))):
                body = self._changed(body, path)
            raw = json.dumps(body)  # with lone surrogates as escapes, as they come over the wire
        except RecursionError:  # nested too deeply for Python to write
            raw = json.dumps(BODIES[path])
        if len(raw) > MOST_BYTES:
            raw = json.dumps(BODIES[path])
        return pick.choice((path, path, *OTHER_PATHS.get(path, ()))), raw.encode()

    def _changed(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        ways = list(places(body))
        if not ways:
            return copy.deepcopy(BODIES[path])
        way = self._chance.choice(ways)
        holder, key = at(body, way[:-1]), way[-1]
        change = self._chance.choice(
            (self._replace, self._replace, self._remove, self._repeat, self._nest, self._add, self._add, self._swap)
        )
        change(body, holder, key, path)
        return body

    def _replace(self, body: Any, holder: Any, key: Any, path: str) -> None:
        holder[key] = self._value()

    def _remove(self, body: Any, holder: Any, key: Any, path: str) -> None:
        del holder[key]

    def _repeat(self, body: Any, holder: Any, key: Any, path: str) -> None:
        if isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(self._chance.choice((1, 2, 50)))]
        else:
            holder[key] = [holder[key]] * self._chance.choice((1, 3, 50))

    def _nest(self, body: Any, holder: Any, key: Any, path: str) -> None:
        inner = holder[key]
        for _ in range(self._chance.choice((1, 2, 40, 300))):
            inner = [inner] if self._chance.random() < 0.5 else {self._chance.choice(self._names): inner}
        holder[key] = inner

    def _add(self, body: Any, holder: Any, key: Any, path: str) -> None:
        if isinstance(holder, list):
            holder.insert(key, self._value())
        elif holder is body:
            holder[self._chance.choice(self._fields.get(path) or self._names)] = self._value()
        else:
            holder[self._chance.choice((*self._names, *self._words, *TEXTS[:12]))] = self._value()

    def _swap(self, body: Any, holder: Any, key: Any, path: str) -> None:
        other = self._chance.choice(list(places(body)))
        holder[key] = copy.deepcopy(at(body, other))

    def _value(self) -> Any:
        kind, pick = self._chance.random(), self._chance
        if kind < 0.35:
            return copy.deepcopy(pick.choice(self._parts))
        if kind < 0.5:
            return copy.deepcopy(self.schema(pick.randint(1, 4)))  # no two places share a list
        if kind < 0.65:
            return pick.choice(TEXTS)
        if kind < 0.75:
            return pick.choice(NUMBERS)
        if kind < 0.85:
            return pick.choice(self._words)
        return copy.deepcopy(pick.choice((None, True, False, [], {}, [None], [[]], [{}], {"": None}, {"type": "text"})))

    def schema(self, depth: int) -> Any:
        """A JSON schema, or nearly one."""
        pick = self._chance
        if depth <= 0:
            return pick.choice(({}, True, False, None, {"type": pick.choice(TYPES)}, {"$ref": "#"}))
        schema: dict[str, Any] = {"type": pick.choice(TYPES)}
        for keyword in pick.sample(KEYWORDS, pick.randint(1, 4)):
            schema[keyword] = self._of(keyword, depth)
        return schema

    def _of(self, keyword: str, depth: int) -> Any:
        pick = self._chance
        if pick.random() < 0.1:
            return pick.choice((None, 5, "x", [], {}, NUMBERS[pick.randrange(len(NUMBERS))]))
        if keyword in ("properties", "patternProperties", "$defs", "dependentSchemas"):
            names = (*self._words[:6], *PATTERNS, "a", "b")
            return {pick.choice(names): self.schema(depth - 1) for _ in range(pick.choice((1, 2, 12)))}
        if keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            return [self.schema(depth - 1) for _ in range(pick.randint(0, 4))]
        fixed: dict[str, Any] = {
            "type": pick.choice(TYPES),
            "required": [pick.choice(("a", "b", ""))] * pick.randint(0, 3),
            "enum": [pick.choice((*NUMBERS, *TEXTS[:8], None, [], {})) for _ in range(pick.choice((0, 1, 30)))],
            "const": pick.choice((*NUMBERS, *TEXTS[:8], None, [1], {"a": 1})),
            "$ref": pick.choice(
                ("#", "#/$defs/a", "#/properties/a", "http://127.0.0.1:9/x", "file:///etc/passwd", "#/x")
            ),
            "$dynamicRef": "#a",
            "pattern": pick.choice(PATTERNS),
            "format": pick.choice(("date", "uuid", "email", "x", "regex")),
        }
        if keyword in fixed:
            return fixed[keyword]
        numbers = keyword.startswith(("min", "max", "multiple"))
        return pick.choice(NUMBERS) if numbers else self.schema(depth - 1)
