"""Calls that are required, and strict tools: whatever a model would like to say, it calls, by the tool's schema.

The model here is the worst there is: it draws any token that the grammar allows.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import jsonschema
import numpy as np
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer

from agentlightning.engine.base import SamplingParams
from agentlightning.gateway import Gateway
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types.call import Int32Array, left_out_of
from tests.gateway.conftest import Site
from tests.gateway.families import FAMILIES, TAGGED, rendering_of
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "Weather?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Ulm"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 2},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "note": {"type": "string", "minLength": 2, "maxLength": 9},
        "code": {"type": "string", "pattern": "^[a-z]/[0-9]{2}$|^none$"},
        "place": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "note"],
    "$defs": {
        "place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "maxProperties": 1}
    },
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "Asks.", "parameters": SCHEMA}}
    for name in ("weather", "forecast")
]
LONGEST = 3000
PATIENCE = 150
"""Tokens after which the model wants to come to an end."""


class DrawingEngine(ScriptedEngine):
    """Draws any token that the request's grammar allows; without one, says no."""

    def __init__(self, rendering: RenderersRendering) -> None:
        super().__init__(rendering, lambda *_: "No.")
        tokenizer = rendering._tokenizer._tokenizer  # pyright: ignore[reportPrivateUsage]
        size = tokenizer.get_vocab_size()
        self._size = size
        self._stops = rendering.stop_token_ids
        self._vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=list(self._stops))
        added = tokenizer.get_added_tokens_decoder()
        self._ends = {*added, *(i for i in range(size) if tokenizer.decode([i]) in ('"', "}", "]", "d", "n"))}
        self._random = random.Random(7)

    def _respond(self, prompt_ids: Int32Array, params: SamplingParams) -> tuple[Int32Array, str, str | None]:
        if params.grammar is None:
            return super()._respond(prompt_ids, params)
        matcher = LLMatcher(self._vocabulary, params.grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        while len(ids) < LONGEST:
            token = self._draw(matcher, len(ids) > PATIENCE)
            ids.append(token)
            if token in self._stops or token in params.stop_token_ids:
                return np.array(ids, np.int32), "stop", None
            assert matcher.consume_token(token), matcher.get_error()
        raise AssertionError("it goes on for ever: " + self.rendering.decode(ids))

    def _draw(self, matcher: LLMatcher, hurried: bool) -> int:
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, count=self._size, bitorder="little")).tolist()
        assert allowed, matcher.get_error()
        stops = [token for token in allowed if token in self._stops]
        ends = [token for token in allowed if token in self._ends]
        if hurried and (stops or ends):
            return self._random.choice(stops or ends)
        return self._random.choice(ends if ends and self._random.random() < 0.2 else allowed)


@asynccontextmanager
async def served(store: InMemoryLightningStore, family: str) -> AsyncIterator[Site]:
    rendering = rendering_of(family)
    engine = DrawingEngine(rendering)
    async with Gateway(store, engine, rendering) as gateway:
        claimed = await store.start_rollout(input={})
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


def check(calls: Any, *names: str) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


QUICK = "qwen3"
"""The chat format of the quick tests."""
NAMED: Any = {"type": "function", "function": {"name": "forecast"}}


HANDOFFS: Any = [
    {"type": "function", "function": {"name": "transfer_to_writer", "description": "Hands over.", **parameters}}
    for parameters in ({}, {"parameters": {"type": "object", "properties": {}, "required": []}}, {"parameters": {}})
]
"""As openai-agents and others write a tool that takes nothing."""


@pytest.mark.parametrize("handoff", HANDOFFS, ids=["left out", "no properties", "empty schema"])
@pytest.mark.parametrize("strict", [False, True])
async def test_a_required_call_without_parameters(
    store: InMemoryLightningStore, handoff: dict[str, Any], strict: bool
) -> None:
    closed = {"type": "object", "properties": {}, "additionalProperties": False}
    function = {**handoff["function"], **({"strict": True, "parameters": closed} if strict else {})}
    tools: Any = [{**handoff, "function": function}]
    named: Any = {"type": "function", "function": {"name": function["name"]}}
    async with served(store, "qwen3") as site, site.client() as client:
        for choice in ("required", named):
            reply = await client.chat.completions.create(model="policy", messages=ASK, tools=tools, tool_choice=choice)
            assert reply.choices[0].finish_reason == "tool_calls"
            calls: Any = reply.choices[0].message.tool_calls
            (call,) = calls
            assert call.function.name == "transfer_to_writer"
            found = json.loads(call.function.arguments)
            assert found == {} if strict else isinstance(found, dict)


@pytest.mark.quick_with("named")
@pytest.mark.parametrize(
    "family", [QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(FAMILIES | TAGGED) if n != QUICK)]
)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_a_required_call_is_made_and_follows_the_schema(
    store: InMemoryLightningStore, family: str, choice: Any
) -> None:
    names = ("forecast",) if choice is NAMED else ("weather", "forecast")
    async with served(store, family) as site:
        async with site.client() as client:
            create: Any = client.chat.completions.create
            for parallel in (True, False) * 3:
                got = await create(
                    model="policy", messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel
                )
                check(got.choices[0].message.tool_calls, *names)
                assert got.choices[0].finish_reason == "tool_calls"
                if choice is NAMED or not parallel:
                    assert len(got.choices[0].message.tool_calls) == 1
        site.check_exact(await site.close())


@pytest.mark.parametrize(
    "family",
    [
        QUICK,
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("qwen3-template", "qwen3.5", "glm-4.5", "llama3", "llama3-template")
        ),
    ],
)
async def test_strict_tools_are_called_by_their_schema_or_not_at_all(
    store: InMemoryLightningStore, family: str
) -> None:
    strict: Any = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    async with served(store, family) as site:
        async with site.client() as client:
            for _ in range(10):
                got = await client.chat.completions.create(model="policy", messages=ASK, tools=strict)
                message = got.choices[0].message
                if message.tool_calls:
                    check(message.tool_calls, "weather", "forecast")
                assert "tool_call>" not in (message.content or ""), "no broken call is left over"
        assert all(params.grammar for params in site.engine.params)


async def test_every_dialect_knows_strict_tools(store: InMemoryLightningStore) -> None:
    async with served(store, "qwen3") as site, site.client() as client:
        responses: Any = client.responses.create
        tools = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
        await responses(model="policy", input="?", tools=tools)
        base_url = site.base_url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=site.key, max_retries=0) as other:
            create: Any = other.messages.create
            named = [{"name": "weather", "input_schema": SCHEMA, "strict": True}]
            await create(model="policy", messages=ASK, max_tokens=2000, tools=named)
        await client.chat.completions.create(model="policy", messages=ASK, tools=TOOLS)
        assert [params.grammar is not None for params in site.engine.params] == [True, True, False]


async def test_a_strict_tool_whose_schema_cannot_be_enforced_is_refused(store: InMemoryLightningStore) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "haiku"}}}
    tools: Any = [{"type": "function", "function": {"name": "poem", "parameters": odd, "strict": True}}]
    async with served(store, "qwen3") as site, site.client() as client:
        with pytest.raises(openai.BadRequestError, match="haiku") as caught:
            await client.chat.completions.create(model="policy", messages=ASK, tools=tools)
        assert caught.value.param == "tools[0].parameters"


def some(api: str, mode: str, *names: str) -> Any:
    """OpenAI's choice among some of the tools, as its two APIs write it."""
    if api == "responses":
        return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}
    listed = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": listed}}


@pytest.mark.quick_with("auto-", "required-responses")
@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_tools_that_are_allowed_are_called(store: InMemoryLightningStore, api: str, mode: str) -> None:
    flat: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    async with served(store, "qwen3") as site:
        called: list[str] = []
        async with site.client() as client:
            for _ in range(12):
                choice = some(api, mode, "forecast")
                if api == "responses":
                    response: Any = await client.responses.create(
                        model="policy", input="?", tools=flat, tool_choice=choice
                    )
                    called += [item.name for item in response.output if item.type == "function_call"]
                else:
                    create: Any = client.chat.completions.create
                    got = await create(model="policy", messages=ASK, tools=TOOLS, tool_choice=choice)
                    called += [call.function.name for call in got.choices[0].message.tool_calls or ()]
            grammars = [params.grammar or "" for params in site.engine.params]
            assert all("forecast" in grammar and "weather" not in grammar for grammar in grammars)
            assert set(called) <= {"forecast"}
            assert len(called) >= 12 or mode == "auto"
            with pytest.raises(openai.BadRequestError) as refused:
                await client.chat.completions.create(
                    model="policy", messages=ASK, tools=TOOLS, tool_choice=some("chat", mode, "poem")
                )
            assert refused.value.param == "tool_choice"
        calls = await site.close()
        site.check_exact(calls)
        assert not left_out_of(await site.spans())


async def test_where_nothing_holds_a_model_to_some_tools_that_is_told(store: InMemoryLightningStore) -> None:
    """A chat format that says nothing of what is no call."""
    free = next(
        f
        for f in sorted(FAMILIES)
        if rendering_of(f).call_grammar(TOOLS, in_reasoning=False, required=False, several=True) is None
    )
    engine = ScriptedEngine(rendering_of(free), lambda *_: "No.")
    async with Gateway(store, engine, rendering_of(free)) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with site.client() as client:
            create: Any = client.chat.completions.create
            await create(model="policy", messages=ASK, tools=TOOLS, tool_choice=some("chat", "auto", "forecast"))
        await site.close()
        assert [(one.field, one.kind) for one in left_out_of(await site.spans())] == [("tool_choice", "unavailable")]
