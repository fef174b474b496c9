"""Methods of tracers, arguments of emitters, helpers for attributes, as older scripts use them."""

# What is old is there while the program runs, not for the checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import json
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import RewardError
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Span


async def test_lifespan_gives_the_store_to_traces() -> None:
    store = InMemoryLightningStore()
    tracer = agl.OtelTracer()
    with tracer.lifespan(store):
        rollout = await store.start_rollout("task")
        async with tracer.trace_context("name", rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id):
            with tracer.operation_context("search", attributes={"query": "x"}) as recording:
                recording.record_attributes({"hits": 3})
                agl.emit_message("inside")
            with pytest.raises(LookupError), tracer.operation_context("fails"):
                raise LookupError("nothing")
        async with tracer.trace_context():
            agl.emit_message("of no attempt")
    message, search, fails = await store.query_spans(rollout.rollout_id)
    assert search.attributes == {"query": "x", "hits": 3}
    assert message.parent_id == search.span_id
    assert fails.status.status_code == "ERROR"
    assert recording.get_recorded_span().span_id == search.span_id


async def test_propagate_false_makes_a_span_that_nobody_keeps() -> None:
    span = agl.emit_reward({"a": 1.0, "b": 0.5}, primary_key="b", propagate=False)
    assert isinstance(span, Span)
    assert [(r.name, r.value) for r in agl.get_rewards_from_span(span)] == [("b", 0.5), ("a", 1.0)]
    async with agl.DummyTracer().trace_context() as trace:
        kept = agl.emit_message("kept", propagate=True)
        agl.emit_object({"a": [1]}, propagate=False)
        agl.emit_annotation({"a": 1}, propagate=False)
    assert trace.spans == [kept]


def test_what_was_emitted_can_be_read() -> None:
    message, thing = agl.emit_message("hello", propagate=False), agl.emit_object({"a": [1]}, propagate=False)
    assert (agl.get_message_value(message), agl.get_object_value(message)) == ("hello", None)
    assert (agl.get_object_value(thing), agl.get_message_value(thing)) == ({"a": [1]}, None)


@pytest.mark.parametrize("error", [TypeError, ValueError, agl.AgentError, RewardError])
@pytest.mark.parametrize("value", ["high", None, {"a": "x"}, float("nan"), {}])
def test_a_bad_reward_is_each_of_these_errors(error: type[Exception], value: Any) -> None:
    with pytest.raises(error):
        agl.emit_reward(value)


async def test_an_operation_is_named_by_keyword_and_takes_inputs_by_name() -> None:
    async with agl.DummyTracer().trace_context() as trace:
        with agl.operation(name="search", kind="web") as op:
            op.set_input("x", limit=3)
            op.set_output(["y"])
        with pytest.raises(agl.ConfigError, match="two names"):
            agl.operation("one", name="two")

        @agl.operation(name="add")
        def add(a: int, b: int) -> int:
            return a + b

        assert add(1, 2) == 3
    search, added = trace.spans
    assert search.attributes["agentlightning.operation.name"] == "search"
    assert search.attributes["kind"] == "web"
    assert search.attributes["agentlightning.operation.input"] == '{"args":["x"],"limit":3}'
    assert added.attributes["agentlightning.operation.name"] == "add"


def test_there_is_one_active_tracer() -> None:
    assert agl.get_active_tracer() is None
    tracer = agl.DummyTracer()
    agl.set_active_tracer(tracer)
    try:
        assert agl.get_active_tracer() is tracer
        with pytest.raises(ValueError, match="already"):
            agl.set_active_tracer(tracer)
    finally:
        agl.clear_active_tracer()
    assert agl.get_active_tracer() is None


async def test_links_and_tags_are_found_again() -> None:
    from agentlightning.utils.otel import (
        check_attributes_sanity,
        extract_links_from_attributes,
        extract_tags_from_attributes,
        filter_and_unflatten_attributes,
        flatten_attributes,
        make_link_attributes,
        make_tag_attributes,
        query_linked_spans,
    )

    async with agl.DummyTracer().trace_context() as trace:
        agl.emit_annotation({"gen_ai.response.id": "r-1", **make_tag_attributes(["a", "b"])})
        agl.emit_reward(1.0, attributes=make_link_attributes({"gen_ai.response.id": "r-1"}))
    call, reward = trace.spans
    assert query_linked_spans(trace.spans, extract_links_from_attributes(reward.attributes)) == [call]
    assert extract_tags_from_attributes(call.attributes) == ["a", "b"]
    nested = {"a": {"b": [1, 2], "c": [{"d": 1}]}}
    flat = flatten_attributes(nested)
    assert flat == {"a.b": [1, 2], "a.c.0.d": 1}
    assert filter_and_unflatten_attributes(flat, "a") == nested["a"]
    with pytest.raises(ValueError, match="below it"):
        check_attributes_sanity({"a": 1, "a.b": 2})


async def test_adapters_read_spans_of_agentops() -> None:
    attributes = {
        "gen_ai.response.id": "r-1",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "What is 1 + 2?",
        "gen_ai.prompt.1.role": "assistant",
        "gen_ai.prompt.1.tool_calls.0.id": "c-1",
        "gen_ai.prompt.1.tool_calls.0.name": "calc",
        "gen_ai.prompt.1.tool_calls.0.arguments": '{"a": 1}',
        "gen_ai.prompt.2.role": "tool",
        "gen_ai.prompt.2.tool_call_id": "c-1",
        "gen_ai.prompt.2.content": "3",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.content": "3",
    }
    span = Span.from_attributes(attributes=attributes, rollout_id="r", attempt_id="a", name="openai.chat.completion")
    adapter = agl.TracerTraceToTriplet(repair_hierarchy=True, llm_call_match=r"openai\.chat\.completion")
    (triplet,) = adapter([span])  # pyright: ignore[reportCallIssue]
    question, asked, result = triplet.prompt["messages"]
    assert question == {"role": "user", "content": "What is 1 + 2?"}
    assert asked["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"a": 1}'}
    assert result == {"role": "tool", "content": "3", "tool_call_id": "c-1"}
    assert triplet.response["message"] == {"role": "assistant", "content": "3"}


def test_tools_of_agentops_are_kept_for_fine_tuning() -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    attributes = {
        "gen_ai.response.id": "r-1",
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": "Weather in Oslo?",
        "gen_ai.request.functions.0.name": "weather",
        "gen_ai.request.functions.0.description": "Looks outside.",
        "gen_ai.request.functions.0.parameters": json.dumps(schema),
        "gen_ai.request.functions.1.name": "stop",
        "gen_ai.completion.0.role": "assistant",
        "gen_ai.completion.0.tool_calls.0.name": "weather",
    }
    span = Span.from_attributes(attributes=attributes, rollout_id="r", attempt_id="a", name="openai.chat.completion")
    (example,) = agl.TraceToMessages().adapt([span])
    assert example["tools"] == [
        {"type": "function", "function": {"name": "weather", "description": "Looks outside.", "parameters": schema}},
        {"type": "function", "function": {"name": "stop"}},
    ]


@pytest.mark.parametrize("error", [agl.AgentError, RuntimeError])
async def test_what_json_cannot_hold_is_each_of_these_errors(error: type[Exception]) -> None:
    async with agl.DummyTracer().trace_context():
        with pytest.raises(error, match="The object cannot be written as JSON"):
            agl.emit_object(object())


def test_an_exceptions_attributes_open_nothing() -> None:
    from agentlightning.utils.otel import format_exception_attributes

    key = f"c-{'x' * 32}"
    assert key not in str(format_exception_attributes(ValueError(f"no answer from http://h/key/{key}/v1")))
