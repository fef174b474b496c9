"""Spans reach the store however the attempt ends, once, and in the order they ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from opentelemetry import trace as otel_trace

from agentlightning.emitter import emit_message, emit_reward, find_final_reward
from agentlightning.errors import ConfigError, StoreError
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import AttemptedRollout


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


async def claim(store: InMemoryLightningStore) -> AttemptedRollout:
    return await store.start_rollout("task")


def span(name: str) -> None:
    otel_trace.get_tracer("lib").start_span(name).end()


async def names(store: InMemoryLightningStore, rollout: AttemptedRollout) -> list[str]:
    return [s.name for s in await store.query_spans(rollout.rollout_id, "latest")]


async def test_spans_are_stored_in_order_when_the_attempt_ends(store: InMemoryLightningStore) -> None:
    async def run(i: int) -> tuple[AttemptedRollout, float]:
        rollout = await claim(store)
        ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        async with OtelTracer().trace_context(store=store, **ids):
            span("first")
            await asyncio.sleep(0)
            emit_reward(i)
            span("last")
        return rollout, float(i)

    for rollout, reward in await asyncio.gather(*(run(i) for i in range(20))):
        stored = (await store.query_spans(rollout.rollout_id, "latest")).items
        assert [s.name for s in stored] == ["first", "agentlightning.annotation", "last"]
        assert [s.sequence_id for s in stored] == [1, 2, 3]
        assert find_final_reward(stored) == reward


async def test_a_long_attempt_is_written_while_it_runs(store: InMemoryLightningStore) -> None:
    rollout = await claim(store)
    tracer = OtelTracer(flush_seconds=0.01)
    async with tracer.trace_context(
        store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
    ) as trace:
        span("early")
        async with asyncio.timeout(10):
            while not await names(store, rollout):  # noqa: ASYNC110 - the store tells nobody of new spans
                await asyncio.sleep(0.005)
        span("late")
    assert await names(store, rollout) == ["early", "late"]
    assert [s.name for s in trace.spans] == ["early", "late"]


@pytest.mark.parametrize("end", [ValueError("the agent fails"), asyncio.CancelledError()])
async def test_spans_are_stored_when_the_agent_fails(store: InMemoryLightningStore, end: BaseException) -> None:
    rollout = await claim(store)

    async def attempt() -> None:
        async with OtelTracer().trace_context(
            store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        ):
            emit_message("so far so good")
            raise end

    with pytest.raises(type(end)):
        await attempt()
    assert await names(store, rollout) == ["agentlightning.message"]


async def test_spans_are_stored_when_the_attempt_is_cancelled_from_outside(store: InMemoryLightningStore) -> None:
    rollout = await claim(store)

    async def attempt() -> None:
        async with OtelTracer().trace_context(
            store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        ):
            span("done before")
            await asyncio.sleep(60)

    task = asyncio.create_task(attempt())
    await asyncio.sleep(0.05)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    assert await names(store, rollout) == ["done before"]


async def test_a_store_that_takes_no_spans_is_an_error_not_a_loss() -> None:
    store = InMemoryLightningStore()
    rollout = await claim(store)

    async def attempt() -> None:
        async with OtelTracer(flush_seconds=0.01).trace_context(
            store=store, rollout_id=rollout.rollout_id, attempt_id=rollout.attempt.attempt_id
        ):
            await store.close()
            span("nowhere to go")
            await asyncio.sleep(0.05)

    with pytest.raises(StoreError):
        await attempt()


async def test_a_store_needs_both_ids(store: InMemoryLightningStore) -> None:
    with pytest.raises(ConfigError, match="both rollout_id and attempt_id"):
        async with OtelTracer().trace_context(store=store, rollout_id="r"):
            pass
