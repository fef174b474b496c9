"""What happens to an attempt from outside while its agent runs, and what strange agents and hooks leave behind."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.runner import LitAgentRunner, executor, presence, runner as runner_module
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import (
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Hook,
    Outcome,
    RolloutStatus,
    Span,
)
from tests.runner.test_runner import doubles, outcome_of, reward_of, run_all, store

__all__ = ["store"]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "PAUSE_SECONDS", 0.05)


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
async def test_cancelling_a_rollout_stops_its_agent_and_no_other(store: InMemoryLightningStore, sync: bool) -> None:
    started, stopped = threading.Event(), threading.Event()

    async def wait(task: str) -> float:
        started.set()
        try:
            await asyncio.sleep(1.5 if task == "short" else 1000)
        except asyncio.CancelledError:
            stopped.set()
            raise
        return 1.0

    def spin(task: str) -> float:
        started.set()
        end = time.monotonic() + (1.5 if task == "short" else 1000)
        try:
            while time.monotonic() < end:
                time.sleep(0.01)
        except BaseException:
            stopped.set()
            raise
        return 1.0

    runner = LitAgentRunner(OtelTracer())
    runner.init(agl.rollout(spin if sync else wait))
    runner.init_worker(0, store)
    endless, short = await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input="endless"), EnqueueRolloutRequest(input="short")]
    )
    stop = asyncio.Event()
    running = asyncio.create_task(runner.iter(stop))
    try:
        assert await asyncio.to_thread(started.wait, 10)
        await store.update_rollout(endless.rollout_id, status=RolloutStatus.CANCELLED)
        assert await asyncio.to_thread(stopped.wait, 10)
        (finished,) = await store.wait_for_rollouts(rollout_ids=[short.rollout_id], timeout=20)
        assert finished.status is RolloutStatus.SUCCEEDED
    finally:
        stop.set()
        await asyncio.wait_for(running, 10)
        runner.teardown()
    attempt = await store.get_latest_attempt(endless.rollout_id)
    assert attempt is not None
    assert (attempt.status, attempt.sequence_id) == (AttemptStatus.CANCELLED, 1)


async def test_a_cancelled_agent_may_clean_up_and_what_it_says_then_does_not_count(
    store: InMemoryLightningStore,
) -> None:
    started, cleaned = threading.Event(), threading.Event()

    @agl.rollout
    async def careful(task: str) -> float:
        try:
            started.set()
            await asyncio.sleep(1000)
        finally:
            await asyncio.sleep(0.2)
            cleaned.set()
            return 1.0  # noqa: B012 - an agent that swallows its cancellation

    runner = LitAgentRunner(OtelTracer())
    runner.init(careful)
    runner.init_worker(0, store)
    rollout = await store.enqueue_rollout("task")
    stop = asyncio.Event()
    running = asyncio.create_task(runner.iter(stop))
    assert await asyncio.to_thread(started.wait, 10)
    await store.update_rollout(rollout.rollout_id, status=RolloutStatus.CANCELLED)
    assert await asyncio.to_thread(cleaned.wait, 10)
    stop.set()
    await asyncio.wait_for(running, 10)
    runner.teardown()
    found = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(found, AttemptedRollout)
    assert (found.status, found.attempt.outcome) == (RolloutStatus.CANCELLED, Outcome.CANCELLED)
    assert await reward_of(store, found) is None


class Hanging(Hook):
    """Hangs in one of its methods."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.entered = asyncio.Event()

    async def _perhaps(self, name: str) -> None:
        if name == self.where:
            self.entered.set()
            await asyncio.Event().wait()

    async def on_rollout_start(self, **_: Any) -> None:
        await self._perhaps("start")

    async def on_trace_start(self, **_: Any) -> None:
        await self._perhaps("trace start")

    async def on_trace_end(self, **_: Any) -> None:
        await self._perhaps("trace end")

    async def on_rollout_end(self, **_: Any) -> None:
        await self._perhaps("end")


@pytest.mark.parametrize("where", ["start", "trace start", "trace end", "end"])
async def test_a_hook_that_hangs_is_left_and_reported(
    store: InMemoryLightningStore, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_module, "HOOK_SECONDS", 0.1)
    (rollout,) = await run_all(store, doubles, [EnqueueRolloutRequest(input=4)], hooks=[Hanging(where)])
    assert rollout.status is RolloutStatus.SUCCEEDED
    assert await reward_of(store, rollout) == 8.0
    assert "Hanging" in caplog.text


@pytest.mark.parametrize("where", ["start", "trace start", "trace end"])
async def test_stopping_the_runner_inside_a_hook_ends_the_attempt_too(
    store: InMemoryLightningStore, where: str
) -> None:
    hook = Hanging(where)
    runner = LitAgentRunner(OtelTracer())
    runner.init(doubles, [hook])
    runner.init_worker(0, store)
    rollout = await store.enqueue_rollout(4)
    running = asyncio.create_task(runner.iter())
    await asyncio.wait_for(hook.entered.wait(), 10)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    runner.teardown()
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    assert attempt.outcome is Outcome.CANCELLED


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("half a character: \ud800"), "half a character: ?"),
        (ValueError("nothing\0ness"), "nothing"),
        (Unspeakable(), "Unspeakable"),
        (ValueError("x" * 5_000_000), "x" * 1000),
    ],
    ids=["surrogate", "nul", "no message", "long"],
)
async def test_any_error_can_be_told(store: InMemoryLightningStore, error: Exception, expected: str) -> None:
    @agl.rollout
    async def fails(task: str) -> float:
        raise error

    attempt = (await outcome_of(store, fails)).attempt
    assert (attempt.outcome, attempt.sequence_id) == (Outcome.AGENT_ERROR, 1)
    assert expected in (attempt.error or "")
    assert len(attempt.error or "") < 200_000


async def test_text_that_is_no_unicode_costs_no_attempt(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def reads_files(task: str) -> float:
        agl.emit_message("caf\udce9")  # what os.listdir gives for a name that is not UTF-8
        with agl.operation("look\udce9") as found:
            found.set_output("caf\udce9")
        return 1.0

    rollout = await outcome_of(store, reads_files)
    assert rollout.attempt.outcome is Outcome.OK
    spans = await store.query_spans(rollout.rollout_id)
    assert any("caf?" in str(span.attributes) for span in spans)


async def test_returned_spans_become_spans_of_the_attempt_whatever_ids_they_bring(
    store: InMemoryLightningStore,
) -> None:
    @agl.rollout
    async def brings_spans(task: str) -> list[Span]:
        agl.emit_reward(0.5)
        return [Span.from_attributes(name="note", attributes={"a": 1}, rollout_id="mine", attempt_id="too")]

    rollout = await outcome_of(store, brings_spans)
    assert rollout.attempt.outcome is Outcome.OK
    spans = await store.query_spans(rollout.rollout_id)
    assert "note" in [span.name for span in spans]


@pytest.mark.slow
async def test_a_very_long_list_of_triplets(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def many(task: str) -> list[agl.Triplet]:
        return [agl.Triplet(prompt="p", response="r", reward=1.0) for _ in range(5000)]

    rollout = await outcome_of(store, many)
    assert rollout.attempt.outcome is Outcome.OK
    assert (await store.query_spans(rollout.rollout_id, limit=1)).total == 5000


async def test_returned_spans_that_cannot_be_stored_are_the_agents_error(store: InMemoryLightningStore) -> None:
    @agl.rollout
    async def brings_anything(task: str) -> list[Span]:
        return [Span.from_attributes(name="note", attributes={"a": object()}, rollout_id="r", attempt_id="a")]

    attempt = (await outcome_of(store, brings_anything)).attempt
    assert (attempt.outcome, attempt.sequence_id) == (Outcome.AGENT_ERROR, 1)
    assert "The span 'note'" in (attempt.error or "")


async def test_an_agent_that_catches_its_cancellation_is_left_behind_with_a_word(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "CLEANUP_SECONDS", 0.3)

    @agl.rollout
    async def stubborn(task: str) -> float:
        for _ in range(40):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return 1.0

    attempt = (await outcome_of(store, stubborn, timeout_seconds=0.3)).attempt
    assert attempt.outcome is Outcome.TIMEOUT
    assert "left behind" in caplog.text


async def test_a_sync_agent_that_cannot_be_stopped_is_left_behind_with_its_line(
    store: InMemoryLightningStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "FORCE_SECONDS", 0.3)

    @agl.rollout
    def sleeper(task: str) -> float:
        time.sleep(1.5)
        return 1.0

    attempt = (await outcome_of(store, sleeper, timeout_seconds=0.3)).attempt
    assert attempt.outcome is Outcome.TIMEOUT
    await asyncio.sleep(1)
    assert "in sleeper: time.sleep(1.5)); its thread is left behind" in caplog.text
