"""Every span lands in the trace of its own attempt: many at once, in tasks and in threads."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from opentelemetry import context as otel_context, trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider

from agentlightning.emitter import emit_message, emit_reward, find_final_reward, operation
from agentlightning.runner.executor import agent_loop
from agentlightning.tracer import DummyTracer, OtelTracer, Trace, Tracer, current_trace, route_spans_of
from agentlightning.types import Span


@pytest.fixture
def tracer() -> OtelTracer:
    tracer = OtelTracer()
    tracer.init()
    return tracer


def library() -> otel_trace.Tracer:
    """What an instrumented library does to get its tracer."""
    return otel_trace.get_tracer("some.library")


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


async def test_collects_the_spans_of_any_library(tracer: OtelTracer) -> None:
    async with tracer.trace_context(rollout_id="r", attempt_id="a") as trace:
        with library().start_as_current_span("outer", attributes={"n": 1}), library().start_as_current_span("inner"):
            pass
    spans = by_name(trace.spans)
    assert names(trace.spans) == ["inner", "outer"]
    assert spans["outer"].attributes == {"n": 1}
    assert spans["outer"].parent_id is None
    assert spans["inner"].parent_id == spans["outer"].span_id
    assert {(s.rollout_id, s.attempt_id, s.trace_id) for s in trace.spans} == {("r", "a", trace.trace_id)}
    assert tracer.get_last_trace() == trace.spans


async def test_two_hundred_rollouts_at_once_do_not_mix(tracer: OtelTracer) -> None:
    async def agent(i: int) -> None:
        for turn in range(3):
            with library().start_as_current_span(f"{i}.turn{turn}"):
                await asyncio.sleep(0)
                emit_message(f"{i} says {turn}")
            await asyncio.sleep(0)
        await asyncio.gather(*(sub_agent(i, k) for k in range(2)))
        emit_reward(i)

    async def sub_agent(i: int, k: int) -> None:
        with library().start_as_current_span(f"{i}.sub{k}"):
            await asyncio.sleep(0)

    async def rollout(i: int) -> tuple[list[Span], list[Span]]:
        async with tracer.trace_context(rollout_id=f"r{i}", attempt_id="a") as trace:
            await agent(i)
        return trace.spans, tracer.get_last_trace()

    for i, (spans, last) in enumerate(await asyncio.gather(*(rollout(i) for i in range(200)))):
        assert len(spans) == 9
        assert last == spans
        assert {s.rollout_id for s in spans} == {f"r{i}"}
        assert all(s.name.startswith((f"{i}.", "agentlightning.")) for s in spans)
        assert find_final_reward(spans) == i


async def test_threads_started_with_the_context_belong_to_the_attempt(tracer: OtelTracer) -> None:
    def sync_agent(i: int) -> None:
        with library().start_as_current_span(f"work{i}"):
            emit_reward(i)

    async def rollout(i: int, pool: ThreadPoolExecutor) -> list[Span]:
        async with tracer.trace_context(rollout_id=f"r{i}", attempt_id="a") as trace:
            await asyncio.to_thread(sync_agent, i)
            context = contextvars.copy_context()
            await asyncio.wrap_future(pool.submit(context.run, sync_agent, i))
        return trace.spans

    with ThreadPoolExecutor(4) as pool:
        for i, spans in enumerate(await asyncio.gather(*(rollout(i, pool) for i in range(50)))):
            assert names(spans) == ["agentlightning.annotation", f"work{i}"] * 2
            assert {s.rollout_id for s in spans} == {f"r{i}"}


async def test_agents_in_an_event_loop_of_their_own_belong_to_their_attempts(tracer: OtelTracer) -> None:
    async def agent(i: int) -> None:
        with library().start_as_current_span(f"work{i}"):
            await asyncio.sleep(0)
            emit_reward(i)

    async def rollout(i: int) -> list[Span]:
        async with tracer.trace_context(rollout_id=f"r{i}", attempt_id="a") as trace:
            await agent_loop().run(agent(i))
        return trace.spans

    for i, spans in enumerate(await asyncio.gather(*(rollout(i) for i in range(50)))):
        assert names(spans) == ["agentlightning.annotation", f"work{i}"]
        assert find_final_reward(spans) == i


async def test_a_thread_that_was_handed_only_the_otel_context_belongs_to_the_attempt(tracer: OtelTracer) -> None:
    def worker(context: otel_context.Context) -> None:
        otel_context.attach(context)
        with library().start_as_current_span("in a bare thread"):
            emit_message("hello")

    async with tracer.trace_context() as trace:
        thread = threading.Thread(target=worker, args=(otel_context.get_current(),))
        thread.start()
        await asyncio.to_thread(thread.join)
    assert names(trace.spans) == ["agentlightning.message", "in a bare thread"]


async def test_a_span_with_an_empty_otel_context_belongs_to_the_attempt_it_starts_in(tracer: OtelTracer) -> None:
    def child(parent: otel_trace.Span) -> None:
        library().start_span("child", context=otel_trace.set_span_in_context(parent, otel_context.Context())).end()

    async with tracer.trace_context() as trace:
        root = library().start_span("root of its own", context=otel_context.Context())
        thread = threading.Thread(target=child, args=(root,))
        thread.start()
        thread.join()
        root.end()
    spans = by_name(trace.spans)
    assert set(spans) == {"root of its own", "child"}
    assert spans["child"].parent_id == spans["root of its own"].span_id
    assert spans["child"].trace_id != trace.trace_id


async def test_a_span_is_routed_by_where_it_started_not_by_where_it_ended(tracer: OtelTracer) -> None:
    async with tracer.trace_context(rollout_id="first", attempt_id="a") as first:
        span = library().start_span("long")
        async with tracer.trace_context(rollout_id="second", attempt_id="a") as second:
            span.end()
        assert current_trace() is first
    assert names(first.spans) == ["long"]
    assert second.spans == []
    assert current_trace() is None


async def test_an_unfinished_span_is_recorded_without_an_end(tracer: OtelTracer) -> None:
    async with tracer.trace_context() as trace:
        span = library().start_span("never ended in time")
    span.end()
    assert [(s.name, s.end_time) for s in trace.spans] == [("never ended in time", None)]


async def test_spans_outside_of_any_attempt_are_nobodys(tracer: OtelTracer) -> None:
    with library().start_as_current_span("before"):
        async with tracer.trace_context() as trace:
            library().start_span("inside").end()
    library().start_span("after").end()
    assert names(trace.spans) == ["inside"]
    assert trace.spans[0].parent_id is None


async def test_work_that_outlives_its_attempt_is_refused_with_a_warning(
    tracer: OtelTracer, caplog: pytest.LogCaptureFixture
) -> None:
    go = asyncio.Event()

    async def straggler() -> None:
        await go.wait()
        emit_reward(1.0)

    async with tracer.trace_context() as trace:
        task = asyncio.create_task(straggler())
    go.set()
    await task
    assert trace.spans == []
    assert "was over" in caplog.text


async def test_exceptions_pass_through_and_close_the_trace(tracer: OtelTracer) -> None:
    opened: list[Trace] = []

    async def agent() -> None:
        async with tracer.trace_context() as trace:
            opened.append(trace)
            with library().start_as_current_span("fails"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await agent()
    (trace,) = opened
    assert trace.closed
    assert trace.spans[0].status.status_code == "ERROR"
    assert trace.spans[0].events[0].name == "exception"
    assert current_trace() is None


async def test_operations_and_library_spans_form_one_tree(tracer: OtelTracer) -> None:
    async with tracer.trace_context() as trace:
        with library().start_as_current_span("agent"), operation("search"), library().start_as_current_span("http"):
            emit_message("hit")
    spans = by_name(trace.spans)
    chain = ["agentlightning.message", "http", "agentlightning.operation", "agent"]
    assert names(trace.spans) == chain
    for child, parent in pairwise(chain):
        assert spans[child].parent_id == spans[parent].span_id
    assert {s.trace_id for s in trace.spans} == {trace.trace_id}


async def test_a_provider_that_is_not_the_global_one_can_be_routed(tracer: OtelTracer) -> None:
    own = TracerProvider()
    route_spans_of(own)
    route_spans_of(own)
    async with tracer.trace_context() as trace:
        own.get_tracer("x").start_span("mine").end()
    assert names(trace.spans) == ["mine"]


@pytest.mark.parametrize("kind", [Tracer, DummyTracer])
async def test_without_opentelemetry_the_emitters_still_record(kind: type[Tracer]) -> None:
    tracer = kind()
    tracer.init()
    tracer.init_worker(0)
    async with tracer.trace_context(rollout_id="r", attempt_id="a") as trace:
        with operation("think"):
            emit_reward(0.5)
        library().start_span("not collected").end()
    tracer.teardown_worker(0)
    tracer.teardown()
    assert names(trace.spans) == ["agentlightning.annotation", "agentlightning.operation"]
    assert tracer.get_last_trace() == trace.spans


def test_no_trace_yet() -> None:
    assert contextvars.Context().run(OtelTracer().get_last_trace) == []


async def test_a_disabled_sdk_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    OtelTracer().init()  # a provider that the process makes while the SDK is disabled records nothing for later tests
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracer = OtelTracer()
    with caplog.at_level(logging.WARNING):
        tracer.init()
        tracer.init()
    assert caplog.text.count("OTEL_SDK_DISABLED") == 1
