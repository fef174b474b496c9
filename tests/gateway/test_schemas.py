"""JSON schemas are checked and made into grammars beside the event loop, unless they are simple; results are kept."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.gateway import Gateway, RequestLimits
from agentlightning.gateway.exchange import AnswerSchema, CallRequest, ToolChoice
from agentlightning.gateway.large.requests import LargeRequests
from agentlightning.gateway.sampling.constraint import FormConstraint, encoded, is_simple
from agentlightning.gateway.sampling.grammars import GrammarCache
from agentlightning.gateway.sampling.size import is_short, strings_in
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine
from tests.gateway.test_large import ASK, post, process_of

NAME: Any = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ODD: Any = {"type": "object", "properties": {"name": {"type": "string", "pattern": "^(a|b)*a(a|b){12}$"}}}


def answer_by(schema: Any) -> Any:
    return {**ASK, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def tool_by(schema: Any, **fields: Any) -> Any:
    return {**ASK, "tools": [{"type": "function", "function": {"name": "calc", "parameters": schema, **fields}}]}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


SIMPLE: dict[str, tuple[Any, bool]] = {
    "an object": (NAME, True),
    "a list of choices": ({"type": "array", "items": {"enum": ["a", 1, None]}}, True),
    "a union": ({"anyOf": [NAME, {"type": "null"}], "description": "x"}, True),
    "a field named like a keyword": ({"type": "object", "properties": {"pattern": {"type": "string"}}}, True),
    "a pattern": (ODD, False),
    "a pattern inside": ({"anyOf": [{"type": "array", "items": ODD}]}, False),
    "a pattern of other fields": ({"type": "object", "additionalProperties": ODD}, False),
    "patterns of names": ({"patternProperties": {"^a": {}}}, False),
    "a count": ({"type": "string", "minLength": 10**9}, False),
    "all of some choices": ({"allOf": [{"anyOf": [NAME, NAME]}] * 20}, False),
    "very many choices": ({"enum": [f"v{i}" for i in range(1000)]}, False),
    "very many fields": ({"properties": {f"p{i}": {} for i in range(1000)}}, False),
    "very long choices": ({"enum": ["x" * 1000] * 20}, False),
    "very deep": (nested(300), False),
}


@pytest.mark.parametrize("name", list(SIMPLE))
def test_what_may_take_long_is_not_simple(name: str) -> None:
    schema, simple = SIMPLE[name]
    of_answer = FormConstraint(tools=None, required=False, several=True, schema=AnswerSchema(schema, "x"))
    tool: Any = {"type": "function", "function": {"name": "t", "parameters": schema}}
    of_tool = FormConstraint(tools=[tool], required=True, several=False)
    for constraint in (of_answer, of_tool):
        assert is_simple(constraint, len(encoded(constraint, 2**20))) is simple


@pytest.mark.quick_with("body0")
@pytest.mark.parametrize(
    "body", [answer_by(ODD), tool_by(ODD, strict=True), {**tool_by(ODD), "tool_choice": "required"}]
)
async def test_others_are_handled_elsewhere_once(site: Site, body: Any) -> None:
    assert (await post(site, "/chat/completions", answer_by(NAME)))[0] == 200
    assert process_of(site).pid is None, "a simple one needs no process"
    status, answer = await post(site, "/chat/completions", body)
    assert status == 200, answer
    pid = process_of(site).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    other = await site.another()
    for place in (site, other):
        assert (await post(place, "/chat/completions", body))[0] == 200
    assert process_of(site).pid in (None, pid), "what is known is not asked for again"
    first, *again = [params.grammar for params in site.engine.params[1:]]
    assert first
    assert again == [first, first]


@pytest.mark.quick_with("body0", "body3")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (answer_by({"$ref": "#/$defs/Missing"}), "response_format"),
        (tool_by({"type": "object", "properties": {"a": {"format": "haiku"}}}, strict=True), "tools[0].parameters"),
        (tool_by(["object"], strict=True), "tools[0].parameters"),
        (answer_by(nested(400)), "response_format"),
    ],
)
async def test_what_cannot_be_enforced_is_refused_there_too(site: Site, body: Any, param: str) -> None:
    status, answer = await post(site, "/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert "cannot be enforced" in answer["error"]["message"]
    assert not site.engine.params


async def test_nesting_as_deep_as_can_be_read_is_refused(site: Site) -> None:
    for depth in range(900, 1000, 25):
        schema = '{"items": ' * depth + "{}" + "}" * depth
        for body in (answer_by("SCHEMA"), tool_by("SCHEMA", strict=True), tool_by("SCHEMA")):
            raw = json.dumps(body).replace('"SCHEMA"', schema).encode()
            status, answer = await post(site, "/chat/completions", raw)
            assert status in (200, 400), (depth, answer)


async def test_parameters_that_are_no_schema_are_any(site: Site) -> None:
    for parameters in ("object", ["object"], 5):
        body = {**tool_by(parameters), "tool_choice": "required"}
        status, answer = await post(site, "/chat/completions", body)
        assert status == 200, answer


@pytest.mark.parametrize("padding", [{}, {"metadata": {"padding": "x" * 200_000}}], ids=["small", "large"])
async def test_schemas_are_bounded(store: InMemoryLightningStore, rendering: RenderersRendering, padding: Any) -> None:
    engine, limits = ScriptedEngine(rendering, calculator), RequestLimits(schema_bytes=1000)
    async with Gateway(store, engine, rendering, request_limits=limits) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        long = {"type": "object", "properties": {"a": {"enum": ["x" * 1000]}}}
        for body in (answer_by(long), tool_by(long, strict=True), {**tool_by(long), "tool_choice": "required"}):
            status, answer = await post(site, "/chat/completions", {**body, **padding})
            assert (status, "schema_bytes" in answer["error"]["message"]) == (413, True), answer
        assert (await post(site, "/chat/completions", {**tool_by(long), **padding}))[0] == 200, "held to nothing"
    with pytest.raises(ConfigError, match="schema_bytes"):
        RequestLimits(schema_bytes=0)


@pytest.mark.slow
async def test_a_schema_that_takes_too_long_is_given_up(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    engine, limits = ScriptedEngine(rendering, calculator), RequestLimits(schema_seconds=1)
    async with Gateway(store, engine, rendering, request_limits=limits) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        padding = {"metadata": {"padding": "x" * 200_000}}
        assert (await post(site, "/chat/completions", {**ASK, **padding}))[0] == 200
        pid = process_of(site).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        status, answer = await post(site, "/chat/completions", answer_by(ODD))
        assert (status, "schema_seconds" in answer["error"]["message"]) == (413, True), answer


async def test_grammars_that_are_kept_are_bounded(
    rendering: RenderersRendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.gateway.sampling.grammars.KEPT_CHARACTERS", 100_000)
    grammars = GrammarCache(rendering, LargeRequests(RequestLimits()))
    prompt_ids = rendering.encode("x")
    for number in range(200):
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string", "description": "x" * 3000}}}
        choice, tool = ToolChoice("required"), {**CALC, "function": {"name": "t", "parameters": schema}}
        request = CallRequest(dialect="chat", model="policy", messages=[], tools=[tool], tool_choice=choice)
        assert await grammars.of("a", request, prompt_ids)
    kept = grammars._kept  # pyright: ignore[reportPrivateUsage]
    assert 10 < len(kept) < 100
    assert max(map(len, kept)) <= 16, "by digest"


def test_the_texts_of_a_schema_are_found_however_deep_they_are() -> None:
    """One after another: each step of a generator inside of generators would take as long as it is deep."""
    texts = list(strings_in({"a": [nested(50_000), {"b": "c"}, 5]}))
    assert sorted(set(texts)) == ["", "a", "array", "b", "c", "items", "string", "type"]
    tool: Any = {"type": "function", "function": {"name": "t", "parameters": {"examples": [[]] * 20_000}}}
    assert not is_short([], [tool]), "it has no characters, and much in it"
    assert is_short([], [CALC])
