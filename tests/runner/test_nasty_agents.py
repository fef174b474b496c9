"""Agents in this process that behave badly: each ends as it should, near its deadline, and the run goes on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, Outcome, RolloutConfig

DEADLINE = 1.0


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    yield store
    await store.close()


async def outcomes(store: InMemoryLightningStore, agent: Any, tasks: list[Any], concurrency: int = 64) -> list[Outcome]:
    runner = LitAgentRunner(OtelTracer(), max_rollouts=len(tasks), concurrency=concurrency)
    runner.init(agent)
    runner.init_worker(0, store)
    config = RolloutConfig(timeout_seconds=DEADLINE)
    asked = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=t, config=config) for t in tasks])
    await asyncio.wait_for(runner.iter(), 60)
    runner.teardown()
    found = [await store.get_rollout_by_id(r.rollout_id) for r in asked]
    assert all(isinstance(r, AttemptedRollout) for r in found)
    return [r.attempt.outcome for r in found]  # pyright: ignore


alive: set[str] = set()


@agl.rollout
def sync_agent(task: str) -> Any:
    alive.add(task)
    try:
        if task == "spins":
            while True:
                pass
        if task == "catches everything once":
            try:
                while True:
                    time.sleep(0.01)
            except BaseException:  # rude
                pass
            while True:
                time.sleep(0.01)
        if task == "sleeps in short naps":
            while True:
                time.sleep(0.05)
        if task == "exits":
            sys.exit(3)
        if task == "stops iterating":
            next(iter(()))
        if task == "thread raises":
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
        return {"NaN": float("nan"), "text": "1.0", "infinite": float("inf")}.get(task, 1.0)
    finally:
        alive.discard(task)


EXPECTED = {
    "spins": Outcome.TIMEOUT,
    "catches everything once": Outcome.TIMEOUT,
    "sleeps in short naps": Outcome.TIMEOUT,
    "exits": Outcome.AGENT_ERROR,
    "stops iterating": Outcome.AGENT_ERROR,
    "thread raises": Outcome.OK,
    "NaN": Outcome.AGENT_ERROR,
    "infinite": Outcome.AGENT_ERROR,
    "text": Outcome.AGENT_ERROR,
    "good": Outcome.OK,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_sync_agents_end_and_their_threads_are_gone(store: InMemoryLightningStore) -> None:
    began = time.monotonic()
    found = dict(zip(EXPECTED, await outcomes(store, sync_agent, list(EXPECTED)), strict=True))
    assert found == EXPECTED
    assert time.monotonic() - began < DEADLINE + 6
    assert alive == set()


@agl.rollout
async def async_agent(task: str) -> Any:
    if task == "spins":
        while True:
            pass
    if task == "a child task spins":
        await asyncio.create_task(spin())
    if task == "blocks":
        time.sleep(15)  # noqa: ASYNC251
    if task == "ignores one cancellation":
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            await asyncio.sleep(0.1)
    if task == "exits":
        sys.exit(3)
    if task == "cancels itself":
        raise asyncio.CancelledError
    return 1.0


async def spin() -> None:
    while True:
        pass


ASYNC = {
    "spins": Outcome.TIMEOUT,
    "a child task spins": Outcome.TIMEOUT,
    "ignores one cancellation": Outcome.TIMEOUT,
    "cancels itself": Outcome.AGENT_ERROR,
    "exits": Outcome.AGENT_ERROR,
    "blocks": Outcome.TIMEOUT,
    "good": Outcome.OK,
}


@pytest.mark.slow
async def test_async_agents_end_and_the_next_ones_run(store: InMemoryLightningStore) -> None:
    began = time.monotonic()
    found = dict(zip(ASYNC, await outcomes(store, async_agent, list(ASYNC), concurrency=1), strict=True))
    assert found == ASYNC
    assert time.monotonic() - began < 4 * (DEADLINE + 4)


async def test_many_are_stopped_at_once(store: InMemoryLightningStore) -> None:
    @agl.rollout
    def agent(task: int) -> float:
        while task % 2:
            time.sleep(0.01)
        return 1.0

    found = await outcomes(store, agent, list(range(32)))
    assert found == [Outcome.TIMEOUT if n % 2 else Outcome.OK for n in range(32)]


async def test_cleanup_ends_before_the_runner_does(store: InMemoryLightningStore) -> None:
    """Also when it takes its time: what an agent holds is free when `iter` returns."""
    cleaned: list[int] = []

    @agl.rollout
    async def agent(task: int) -> float:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.3)
            cleaned.append(os.getpid())
        return 1.0

    runner = LitAgentRunner(OtelTracer())
    runner.init(agent)
    runner.init_worker(0, store)
    await store.enqueue_rollout(1)
    running = asyncio.create_task(runner.iter())
    await asyncio.sleep(0.5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    runner.teardown()
    assert cleaned == [os.getpid()]


ENDS = """
import asyncio, atexit, sys
import agentlightning as agl
from agentlightning.runner.executor import agent_loop

left = []

async def server():
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.05)
        print("the server has ended", flush=True)

async def agent():
    left.append(asyncio.create_task(server()))
    await asyncio.sleep(0)

asyncio.run(agent_loop().run(agent()))
atexit.register(print, "atexit")
"""


def test_what_agents_leave_running_ends_before_the_program_does() -> None:
    """As AutoGen's sessions with MCP servers, which wait for ever in `atexit` where their tasks have not ended."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["the server has ended", "atexit"]
    assert not done.stderr
