"""The runner on a real store: every way an agent can end becomes the right outcome, and none stops the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import StoreUnavailableError
from agentlightning.gateway import AttemptSummary
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import (
    LLM,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Hook,
    Outcome,
    ProxyLLM,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
)
from agentlightning.types.reward import find_final_reward


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


async def run_all(
    store: InMemoryLightningStore, agent: Any, requests: list[EnqueueRolloutRequest], **options: Any
) -> list[AttemptedRollout]:
    """Run rollouts to their end with one runner and return them in order."""
    hooks = options.pop("hooks", ())
    runner = LitAgentRunner(OtelTracer(), **options)
    runner.init(agent, hooks)
    runner.init_worker(0, store)
    ids = [r.rollout_id for r in await store.enqueue_many_rollouts(requests)]
    stop = asyncio.Event()
    running = asyncio.create_task(runner.iter(stop))
    try:
        async with asyncio.timeout(30):
            await store.wait_for_rollouts(rollout_ids=ids)
    finally:
        stop.set()
        await running
        runner.teardown()
    found = [await store.get_rollout_by_id(i) for i in ids]
    assert all(isinstance(r, AttemptedRollout) for r in found)
    return found  # pyright: ignore[reportReturnType]


async def outcome_of(store: InMemoryLightningStore, agent: Any, **config: Any) -> AttemptedRollout:
    request = EnqueueRolloutRequest(input="task", config=RolloutConfig(**config))
    return (await run_all(store, agent, [request]))[0]


async def reward_of(store: InMemoryLightningStore, rollout: AttemptedRollout) -> float | None:
    return find_final_reward((await store.query_spans(rollout.rollout_id)).items)


@agl.rollout
async def doubles(task: int) -> float:
    await asyncio.sleep(0.001)
    return task * 2.0


@agl.rollout
def doubles_in_a_thread(task: int) -> float:
    assert threading.current_thread() is not threading.main_thread()
    return task * 2.0


@pytest.mark.parametrize("agent", [doubles, doubles_in_a_thread], ids=["async", "sync"])
async def test_many_at_once_each_with_its_own_reward(store: InMemoryLightningStore, agent: Any) -> None:
    requests = [EnqueueRolloutRequest(input=i) for i in range(100)]
    rollouts = await run_all(store, agent, requests, concurrency=32)
    assert {r.status for r in rollouts} == {RolloutStatus.SUCCEEDED}
    assert [await reward_of(store, r) for r in rollouts] == [i * 2.0 for i in range(100)]


async def test_an_agent_that_raises_is_an_agent_error_with_its_traceback(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def broken(task: str) -> float:
        raise KeyError("no such thing")

    rollout = await outcome_of(store, broken)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert rollout.attempt.error is not None
    assert rollout.attempt.error.startswith("KeyError: 'no such thing'")
    assert "in broken" in rollout.attempt.error
    assert await reward_of(store, rollout) is None


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "emitted no reward"),
        (float("nan"), "finite number"),
        (float("inf"), "finite number"),
        ("1.0", "must be a number, not str"),
        ([1.0], "something else than spans"),
    ],
)
async def test_what_is_no_reward_says_what_to_return(
    store: InMemoryLightningStore, returned: Any, message: str
) -> None:
    @agl.rollout
    async def agent(task: str) -> Any:
        return returned

    rollout = await outcome_of(store, agent)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert message in (rollout.attempt.error or "")


async def test_none_with_an_emitted_reward_is_fine(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def agent(task: str) -> None:
        agl.emit_reward(0.5)

    rollout = await outcome_of(store, agent)
    assert rollout.attempt.outcome is Outcome.OK
    assert await reward_of(store, rollout) == 0.5


async def test_an_agent_that_never_ends_is_stopped_at_its_deadline(store: InMemoryLightningStore) -> None:
    stopped = threading.Event()

    @agl.rollout
    async def endless(task: str) -> float:
        try:
            await asyncio.sleep(1000)
        finally:
            stopped.set()
        return 1.0

    rollout = await outcome_of(store, endless, timeout_seconds=0.2)
    assert rollout.attempt.status is AttemptStatus.TIMEOUT
    assert rollout.attempt.outcome is Outcome.TIMEOUT
    assert stopped.wait(5), "the agent itself must be stopped, not only forgotten"


async def test_an_agents_own_timeout_is_its_own_error(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def impatient(task: str) -> float:
        raise TimeoutError("the tool took too long")

    rollout = await outcome_of(store, impatient)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert "the tool took too long" in (rollout.attempt.error or "")


async def test_an_agent_that_blocks_its_loop_does_not_block_the_runner(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def rude(task: float) -> float:
        time.sleep(task)  # noqa: ASYNC251 - that is the point
        return 1.0

    requests = [EnqueueRolloutRequest(input=0.5)]
    began = time.perf_counter()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    await run_all(store, rude, requests)
    ticking.cancel()
    assert ticks > 0.3 * (time.perf_counter() - began) / 0.01


async def test_failing_agents_do_not_stop_the_others(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def sometimes(task: int) -> float:
        if task % 3 == 0:
            raise RuntimeError("bad luck")
        return 1.0

    rollouts = await run_all(store, sometimes, [EnqueueRolloutRequest(input=i) for i in range(30)])
    failed = [i for i, r in enumerate(rollouts) if r.status is RolloutStatus.FAILED]
    assert failed == list(range(0, 30, 3))


async def test_stopping_the_runner_cancels_what_runs(store: InMemoryLightningStore) -> None:
    started = threading.Event()

    @agl.rollout
    async def endless(task: str) -> float:
        started.set()
        await asyncio.sleep(1000)
        return 1.0

    runner = LitAgentRunner(OtelTracer())
    runner.init(endless)
    runner.init_worker(0, store)
    rollout = await store.enqueue_rollout("task")
    running = asyncio.create_task(runner.iter())
    assert await asyncio.to_thread(started.wait, 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    runner.teardown()
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.outcome is Outcome.CANCELLED


class Hesitant:
    """A gateway that cannot store the calls of an attempt when it is first asked to close it."""

    def __init__(self) -> None:
        self.asked = 0

    def bind(self, resource: ProxyLLM, rollout_id: str, attempt_id: str, scopes: Sequence[str]) -> LLM:
        raise NotImplementedError

    async def open_attempt(self, rollout_id: str, attempt_id: str) -> None:
        pass

    async def close_attempt(self, rollout_id: str, attempt_id: str) -> AttemptSummary:
        self.asked += 1
        if self.asked == 1:
            raise StoreUnavailableError("The store is away.")
        return AttemptSummary()


async def test_an_attempt_whose_calls_cannot_be_stored_is_closed_later(
    store: InMemoryLightningStore,
) -> None:
    gateway = Hesitant()
    (rollout,) = await run_all(store, doubles, [EnqueueRolloutRequest(input=2)], gateway=gateway)
    assert (rollout.status, gateway.asked) == (RolloutStatus.SUCCEEDED, 2)
    assert rollout.attempt.sequence_id == 1, "it was not done again"


async def test_max_rollouts_ends_the_runner(store: InMemoryLightningStore) -> None:
    runner = LitAgentRunner(OtelTracer(), max_rollouts=3, concurrency=2)
    runner.init(doubles)
    runner.init_worker(0, store)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(5)])
    await asyncio.wait_for(runner.iter(), 20)
    runner.teardown()
    assert (await store.statistics())["rollouts"]["succeeded"] == 3


async def test_hooks_see_every_stage_and_a_failing_one_stops_nothing(
    store: InMemoryLightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []

    class Watching(Hook):
        async def on_rollout_start(self, *, agent: Any, runner: Any, rollout: Any) -> None:
            seen.append("start")
            raise ValueError("a bad hook")

        async def on_trace_start(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
            seen.append("trace start")
            return 0.5  # pyright: ignore[reportReturnType]

        async def on_trace_end(self, *, agent: Any, runner: Any, tracer: Any, rollout: Any) -> None:
            seen.append("trace end")

        async def on_rollout_end(self, *, agent: Any, runner: Any, rollout: Any, spans: Any) -> None:
            seen.append(f"end {find_final_reward(spans)}")

    rollouts = await run_all(store, doubles, [EnqueueRolloutRequest(input=4)], hooks=[Watching()])
    assert rollouts[0].status is RolloutStatus.SUCCEEDED
    assert seen == ["start", "trace start", "trace end", "end 8.0"]
    assert "a bad hook" in caplog.text
    assert (
        "Watching.on_trace_start returned 0.5, which has no effect: a reward is what the agent returns" in caplog.text
    )


async def test_step_runs_the_agent_once_with_given_resources(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def agent(task: str, llm: LLM, rollout: AttemptedRollout) -> float:
        assert rollout.mode is RolloutMode.VAL
        return 1.0 if (task, llm.model) == ("hello", "some-model") else 0.0

    runner = LitAgentRunner(OtelTracer())
    runner.init(agent)
    runner.init_worker(0, store)
    llm = LLM(endpoint="http://127.0.0.1:9/v1", model="some-model")
    finished = await runner.step("hello", resources={"main": llm}, mode=RolloutMode.VAL)
    runner.teardown()
    assert finished.status is RolloutStatus.SUCCEEDED
    assert await reward_of(store, finished) == 1.0


async def test_a_missing_resource_is_named(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def agent(task: str, llm: LLM) -> float:
        return 1.0

    rollout = await outcome_of(store, agent)
    assert "asks for an LLM" in (rollout.attempt.error or "")
    assert "models={'llm'" in (rollout.attempt.error or "")


async def test_a_short_lease_is_kept_alive(store: InMemoryLightningStore) -> None:
    """An agent that says nothing for longer than its lease is not given up, because its runner is there."""

    @agl.rollout
    async def quiet(task: str) -> float:
        await asyncio.sleep(3.0)
        return 1.0

    rollout = await outcome_of(store, quiet, unresponsive_seconds=1.0)
    assert rollout.attempt.outcome is Outcome.OK
    assert rollout.attempt.sequence_id == 1
