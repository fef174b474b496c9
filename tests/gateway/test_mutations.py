"""Whole requests of all wire formats with one value after the other replaced: read or refused, nothing else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from agentlightning.errors import ModelError
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.sampling.settings import Overrides, params_for, settle
from agentlightning.rendering.messages import with_tool_names
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC
from tests.gateway.families import rendering_of

FUNCTION = CALC["function"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "calc", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "5"},
    ],
    "tools": [CALC],
    "tool_choice": {"type": "function", "function": {"name": "calc"}},
    "stream_options": {"include_usage": True},
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    **{"n": 1, "temperature": 1, "top_p": 0.5, "top_k": 3, "max_tokens": 5, "stop": ["a"], "seed": 1},
    **{
        "metadata": {},
        "frequency_penalty": 0,
        "logit_bias": {"5": 1},
        "min_tokens": 0,
        "functions": [],
        "modalities": ["text"],
    },
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "content": []},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "calc", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ],
    "instructions": "i",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "auto",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    "include": ["message.output_text.logprobs"],
    **{"max_output_tokens": 5, "temperature": 1, "store": True, "truncation": "disabled", "top_logprobs": 1},
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 9,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "a", "name": "calc", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "5"}]}],
        },
    ],
    "tools": [{"name": "calc", "input_schema": FUNCTION["parameters"], "description": "d"}],
    "tool_choice": {"type": "tool", "name": "calc", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"},
}
COMPLETIONS: dict[str, Any] = {
    **{"model": "m", "prompt": ["x"], "n": 1, "logprobs": 2, "max_tokens": 3, "stop": "x", "echo": False},
    "stream_options": {"include_usage": True},
}
GEMINI: dict[str, Any] = {
    "model": "m",
    "contents": [
        {"role": "user", "parts": [{"text": "x"}, {"text": "y"}]},
        {"role": "model", "parts": [{"text": "r", "thought": True}, {"text": "z", "thoughtSignature": "eA=="}]},
        {"role": "model", "parts": [{"functionCall": {"id": "c", "name": "calc", "args": {"a": 1}}}]},
        {"role": "user", "parts": [{"functionResponse": {"id": "c", "name": "calc", "response": {"result": "5"}}}]},
    ],
    "systemInstruction": {"parts": [{"text": "s"}]},
    "tools": [{"functionDeclarations": [FUNCTION]}],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["calc"]}},
    "generationConfig": {
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5},
        "responseMimeType": "application/json",
        "responseSchema": SCHEMA,
        "responseFormat": [{"text": {"mimeType": "application/json", "schema": SCHEMA}}],
        **{"temperature": 1, "topP": 0.5, "topK": 3, "maxOutputTokens": 5, "stopSequences": ["a"], "seed": 1},
        **{"candidateCount": 1, "responseLogprobs": True, "logprobs": 2, "responseModalities": ["TEXT"]},
    },
    "safetySettings": [{"category": "a", "threshold": "b"}],
}
BODIES = {
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "gemini": GEMINI,
    "completions": COMPLETIONS,
}

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**30, "", "x", "function", "\0", [], {}, [None], [[]], [{}], [1, "a"]),
    *({"type": []}, {"type": "text"}, {"a": None}, {"type": "object", "properties": 5}, {"$ref": "#"}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def replaced(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(body)
    at: Any = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_any_value_anywhere_is_read_or_refused(name: str) -> None:
    (dialect,) = [d for d in DIALECTS if d.name == name]
    renderings = [rendering_of(family) for family in ("qwen3", "llama3-template")]
    body = BODIES[name]
    dialect.parse(body, {})
    read = refused = 0
    for number, path in enumerate(places(body)):
        for value in VALUES:
            try:
                request = dialect.parse(replaced(body, path, value), {})
                read += 1
                used = settle(request.asked, Overrides(), RolloutMode.TRAIN, "r", 0)
                params_for(used, choice=0, most_tokens=9, top_logprobs=0)
                if request.messages:
                    renderings[number % 2].render(with_tool_names(request.messages), request.tools)
            except (Refusal, ModelError):
                refused += 1
    assert read > 20
    assert refused > 50
