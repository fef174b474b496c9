"""As scripts for 0.2 are written: an agent class run by hand in a debug mode, hooks, and spans read from the store."""

import asyncio
from typing import Any, cast

from agentlightning import (
    LLM,
    Hook,
    InMemoryLightningStore,
    LitAgent,
    LitAgentRunner,
    NamedResources,
    OtelTracer,
    PromptTemplate,
    Rollout,
    RolloutConfig,
    emit_exception,
    emit_message,
    emit_object,
    find_final_reward,
    operation,
    setup_logging,
)
from agentlightning.adapter import TraceToMessages, TracerTraceToTriplet
from agentlightning.emitter import emit_annotation, get_message_value
from agentlightning.emitter.annotation import OperationContext
from agentlightning.semconv import AGL_OPERATION, LightningSpanAttributes
from agentlightning.utils.otel import extract_tags_from_attributes, make_tag_attributes

setup_logging("INFO")


class SqlAgent(LitAgent[dict[str, Any]]):
    def __init__(self, trained_agents: str | None = r"write", val_temperature: float | None = None) -> None:
        super().__init__(trained_agents=trained_agents)
        self.val_temperature = val_temperature

    def rollout(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> float | None:
        llm: LLM = cast(LLM, resources["main_llm"])
        assert llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id).startswith("http://localhost:9999")
        sampled = llm.sampling_parameters.get("temperature", 0.0)
        assert (self.val_temperature if rollout.mode == "val" else sampled) is None
        with operation(name="search", conversation_id=3) as searching:
            assert isinstance(searching, OperationContext)
            searching.set_input("query", k=3)
            searching.set_output({"hits": [1, 2]})
        emit_message("hello", attributes={"a": 1})
        emit_object({"x": [1, 2]}, attributes=make_tag_attributes(["first"]))
        emit_annotation({"step": {"n": 1, "names": ["a", "b"]}})
        try:
            raise ValueError("bad")
        except ValueError as error:
            emit_exception(error)
        assert self.helper(task) == "q!"
        return 1.0

    @operation
    def helper(self, task: dict[str, Any]) -> str:
        return task["question"] + "!"

    def validation_rollout(self, task: dict[str, Any], resources: NamedResources, rollout: Rollout) -> float | None:
        return self.rollout(task, resources, rollout)


class Seen(Hook):
    def __init__(self) -> None:
        super().__init__()
        self.stages: list[Any] = []

    async def on_rollout_start(self, *, agent, runner, rollout) -> None:
        self.stages.append("rollout_start")

    async def on_trace_start(self, *, agent, runner, tracer, rollout) -> None:
        self.stages.append("trace_start")

    async def on_trace_end(self, *, agent, runner, tracer, rollout) -> None:
        self.stages.append(("trace_end", len(tracer.get_last_trace())))

    async def on_rollout_end(self, *, agent, runner, rollout, spans) -> None:
        self.stages.append(("rollout_end", len(spans)))


async def debug_with_runner(store: InMemoryLightningStore) -> None:
    hook = Seen()
    runner = LitAgentRunner[dict[str, Any]](OtelTracer(), max_rollouts=2, poll_interval=0.1)
    resources: NamedResources = {
        "main_llm": LLM(endpoint="http://localhost:9999/v1", model="m", sampling_parameters={"temperature": 0.7})
    }
    with runner.run_context(agent=SqlAgent(), store=store, hooks=[hook]):
        await runner.step({"question": "q"}, resources=resources, mode="val")
    assert hook.stages == ["rollout_start", "trace_start", ("trace_end", 7), ("rollout_end", 7)]


async def read_spans(store: InMemoryLightningStore) -> None:
    (rollout,) = await store.query_rollouts(status_in=["succeeded"])
    spans = await store.query_spans(rollout.rollout_id, attempt_id="latest")
    assert find_final_reward(spans) == 1.0
    named = [s.attributes[LightningSpanAttributes.OPERATION_NAME.value] for s in spans if s.name == AGL_OPERATION]
    assert named == ["search", "SqlAgent.helper"]
    assert [get_message_value(s) for s in spans if get_message_value(s)] == ["hello"]
    assert [tags for s in spans if (tags := extract_tags_from_attributes(s.attributes))] == [["first"]]
    assert TracerTraceToTriplet().adapt(spans) == []
    assert TraceToMessages().adapt(spans) == []
    latest = await store.get_latest_resources()
    assert latest.resources["main_llm"].model == "m"


async def queue_by_hand(store: InMemoryLightningStore) -> None:
    config = RolloutConfig(max_attempts=2, retry_condition=["failed", "timeout"])
    rollout = await store.enqueue_rollout(input={"a": 1}, mode="train", config=config)
    claimed = await store.dequeue_rollout(worker_id="w1")
    assert (claimed.rollout_id, claimed.attempt.sequence_id) == (rollout.rollout_id, 1)
    assert await store.get_next_span_sequence_id(claimed.rollout_id, claimed.attempt.attempt_id) >= 1
    await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed")
    assert (await store.get_rollout_by_id(rollout.rollout_id)).status == "requeuing"
    while (claimed := await store.dequeue_rollout()) is None:
        await asyncio.sleep(0.1)
    assert claimed.attempt.sequence_id == 2
    await store.update_attempt(claimed.rollout_id, "latest", status="succeeded")
    (done,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=0.0)
    assert done.status == "succeeded"
    added = await store.add_resources({"prompt": PromptTemplate(template="Hi {n}", engine="f-string")})
    updated = await store.update_resources(added.resources_id, added.resources)
    assert updated.version == added.version + 1


async def main() -> None:
    store = InMemoryLightningStore(thread_safe=True)
    await debug_with_runner(store)
    await read_spans(store)
    await queue_by_hand(store)


if __name__ == "__main__":
    asyncio.run(main())
