"""As scripts for 0.3 are written: a tracer used by hand, spans in the store, triplets, rewards in parts, links."""

import asyncio

from opentelemetry.trace import get_tracer as get_otel_tracer

import agentlightning as agl
from agentlightning.adapter.triplet import RewardMatchPolicy, TracerTraceToTriplet
from agentlightning.semconv import LightningSpanAttributes
from agentlightning.tracer import OtelTracer
from agentlightning.types import SpanCoreFields, TraceStatus
from agentlightning.utils.otel import (
    extract_links_from_attributes,
    get_tracer,
    make_link_attributes,
    query_linked_spans,
)

CALL = {
    "gen_ai.response.id": "r-1",
    "gen_ai.prompt.0.role": "user",
    "gen_ai.prompt.0.content": "hi",
    "gen_ai.completion.0.role": "assistant",
    "gen_ai.completion.0.content": "yo",
    "prompt_token_ids": [1, 2],
    "response_token_ids": [3],
}


def write_spans(tracer: OtelTracer) -> None:
    with get_tracer().start_as_current_span("turn") as turn:
        turn.set_attribute("agent.name", "writer")
        with get_otel_tracer("a client").start_as_current_span("openai.chat.completion") as call:
            call.set_attributes(CALL)
    agl.emit_reward(1.0)
    linked = make_link_attributes({"gen_ai.response.id": "r-1"})
    agl.emit_reward({"task": 0.5, "style": 0.2}, primary_key="task", attributes=linked)
    agl.emit_annotation({"a": {"b": 1}})
    with tracer.operation_context("search", {"x": 1}) as recording:
        recording.record_attributes({"y": 2})
        recording.record_status("OK")
    made: SpanCoreFields = tracer.create_span("custom", {"k": 1})
    assert (made.name, made.attributes["k"]) == ("custom", 1)


def read_spans(spans: list[agl.Span]) -> None:
    adapter = TracerTraceToTriplet(
        agent_match="writer",
        llm_call_match="chat",
        reward_match=RewardMatchPolicy.FIRST_OCCURRENCE,
        repair_hierarchy=True,
    )
    (triplet,) = adapter(spans)
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2], [3])
    assert triplet.metadata["agent_name"] == "writer"
    assert triplet.metadata["response_id"] == "r-1"
    rewards = agl.find_reward_spans(spans)
    assert agl.find_final_reward(spans) == 0.5
    assert [(part.name, part.value) for part in agl.get_rewards_from_span(rewards[1])] == [
        ("task", 0.5),
        ("style", 0.2),
    ]
    links = extract_links_from_attributes(rewards[1].attributes)
    assert links[0].key_match == "gen_ai.response.id"
    assert [span.name for span in query_linked_spans(spans, links)] == ["openai.chat.completion"]
    made = agl.Span.from_attributes(attributes={"z": 1}, status=TraceStatus(status_code="OK"))
    assert made.name == "agentlightning.virtual"
    assert made.rollout_id


async def with_a_store() -> None:
    store = agl.InMemoryLightningStore()
    tracer = OtelTracer()
    with tracer.lifespan(store):
        rollout = await store.start_rollout(input={"origin": "by hand"})
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with tracer.trace_context("by hand", **ids):
            write_spans(tracer)
        spans = tracer.get_last_trace()
        stored = await store.query_spans(rollout.rollout_id)
        assert {span.span_id for span in stored} == {span.span_id for span in spans}
        read_spans(list(stored))
        await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
        assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "succeeded"


@agl.operation
def add(a: int, b: int) -> int:
    return a + b


async def without_a_store() -> None:
    tracer = OtelTracer()
    with tracer.lifespan():
        async with tracer.trace_context():
            assert add(1, b=2) == 3
        (span,) = tracer.get_last_trace()
        assert span.attributes[LightningSpanAttributes.OPERATION_NAME.value] == "add"


if __name__ == "__main__":
    asyncio.run(with_a_store())
    asyncio.run(without_a_store())
