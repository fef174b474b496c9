"""What agents and tracers of older scripts do: how they are called, what they return, what goes wrong in them."""

# What is old is there while the program runs, not for the checker.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportInvalidTypeArguments=false

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptedRollout, Outcome


async def run(agent: agl.LitAgent[Any], tracer: agl.Tracer | None = None, mode: Any = None) -> AttemptedRollout:
    """One rollout through the queue, as `fit` does it."""
    store = InMemoryLightningStore()
    runner = agl.LitAgentRunner(tracer or agl.DummyTracer(), max_rollouts=1)
    runner.init(agent)
    runner.init_worker(0, store)
    await store.enqueue_rollout("task", mode)
    async with asyncio.timeout(60):
        await runner.iter()
    runner.teardown()
    (rollout,) = await store.query_rollouts()
    found = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(found, AttemptedRollout)
    await store.close()
    return found


class Failing(agl.Tracer):
    """Fails before the agent starts."""

    @asynccontextmanager
    async def trace_context(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        raise RuntimeError("no server")
        yield


class OldStyle(agl.Tracer):
    """Its context is a generator without the decorator, and gives something of its own."""

    async def trace_context(self, *_: Any, **__: Any) -> AsyncIterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield "my own trace"


class Sync(agl.Tracer):
    def trace_context(self, *_: Any, **__: Any) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        yield self


class NoContext(agl.Tracer):
    def trace_context(self, *_: Any, **__: Any) -> Any:
        return 3


@agl.rollout
def emits(task: str) -> None:
    agl.emit_reward(0.5)


@pytest.mark.parametrize(("tracer", "words"), [(Failing(), "no server"), (NoContext(), "asynccontextmanager")])
async def test_a_tracer_that_fails_ends_the_attempt(tracer: agl.Tracer, words: str) -> None:
    rollout = await run(emits, tracer)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert words in str(rollout.attempt.error)


@pytest.mark.parametrize("tracer", [OldStyle(), Sync()])
async def test_a_tracer_of_an_older_kind_works(tracer: agl.Tracer) -> None:
    assert (await run(emits, tracer)).attempt.outcome is Outcome.OK


class First(agl.LitAgent[str]):
    """As agents were written for 0.1."""

    def training_rollout(self, task: str, rollout_id: str, resources: Any) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert rollout_id.startswith("ro-")
        assert dict(resources) == {}
        return 1.0


async def test_training_rollout_of_the_first_version_is_told_by_its_signature() -> None:
    assert (await run(First(), mode=agl.RolloutMode.TRAIN)).attempt.outcome is Outcome.OK


class Twofold(agl.LitAgent[str]):
    def training_rollout(self, task: str, resources: Any, rollout: Any) -> float:
        raise AssertionError("not for training")

    def validation_rollout(self, task: str, resources: Any, rollout: Any) -> float:
        return 1.0


@pytest.mark.parametrize("mode", [None, agl.RolloutMode.VAL, agl.RolloutMode.TEST])
async def test_every_mode_but_train_validates(mode: Any) -> None:
    assert (await run(Twofold(), mode=mode)).attempt.outcome is Outcome.OK


async def test_spans_of_opentelemetrys_sdk_may_be_returned() -> None:
    from opentelemetry.sdk.trace import TracerProvider

    @agl.rollout
    def returns(task: str) -> Any:
        span = TracerProvider().get_tracer("mine").start_span("work", attributes={"agentlightning.reward.0.value": 1.0})
        span.end()
        return [span, agl.SpanCoreFields(name="more", attributes={"a": 1})]

    store = InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=returns, store=store):
        rollout = await runner.step("task")
    spans = await store.query_spans(rollout.rollout_id)
    assert [span.name for span in spans] == ["work", "more"]
    assert {span.attempt_id for span in spans} == {rollout.attempt.attempt_id}


async def test_step_raises_what_the_agent_raised() -> None:
    @agl.rollout
    async def fails(task: str, llm: agl.LLM) -> float:
        raise LookupError(f"{llm.model} knows nothing")

    store = InMemoryLightningStore()
    runner = agl.LitAgentRunner[str](agl.OtelTracer(), poll_interval=1.0)
    with runner.run_context(agent=fails, store=store, worker_id=3):
        assert runner.get_store() is store
        assert runner.get_agent() is fails
        with pytest.raises(LookupError, match="m knows nothing"):
            await runner.step("task", {"llm": agl.LLM(endpoint="http://localhost:1/v1", model="m")})
    (rollout,) = await store.query_rollouts()
    assert rollout.status == "failed"


async def test_an_event_of_a_thread_stops_a_runner() -> None:
    stop = threading.Event()
    runner = agl.LitAgentRunner(agl.DummyTracer())
    with runner.run_context(agent=emits, store=InMemoryLightningStore()):
        running = asyncio.create_task(runner.iter(event=stop))
        await asyncio.sleep(0.2)
        stop.set()
        async with asyncio.timeout(60):
            await running


async def test_an_agent_knows_its_runner_and_tracer() -> None:
    class Asking(agl.LitAgent[str]):
        def rollout(self, task: str, resources: Any, rollout: Any) -> float:
            assert self.runner is self.get_runner()
            self.tracer.create_span("looked", attributes={"at": {"what": "page"}})
            return float(self.runner.get_worker_id() != "")

    store = InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    agent = Asking()
    with runner.run_context(agent=agent, store=store):
        rollout = await runner.step("task")
    spans = await store.query_spans(rollout.rollout_id, name="looked")
    assert [span.attributes for span in spans] == [{"at.what": "page"}]
    with pytest.raises(ValueError, match="There is no runner here"):
        _ = agent.runner


def test_a_rollout_can_be_made_by_hand() -> None:
    rollout = agl.Rollout(rollout_id="dummy", input={"question": "?"})
    assert rollout.start_time > 0


def test_a_prompt_in_poml() -> None:
    prompt = agl.PromptTemplate(template="<poml><p>Hello {{name}}!</p></poml>", engine="poml")
    try:
        import poml  # noqa: F401
    except ImportError:
        with pytest.raises(agl.ConfigError, match="pip install poml"):
            prompt.format(name="Ann")
    else:
        assert prompt.format(name="Ann") == "Hello Ann!"
