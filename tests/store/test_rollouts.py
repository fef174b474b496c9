"""Rollouts and attempts: their life, retries, idempotence, waits."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentlightning.errors import ConflictError, NotFoundError, StoreError
from agentlightning.store import LightningStore
from agentlightning.types import (
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Outcome,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    WorkerStatus,
)
from tests.store.builders import make_span


async def claim_one(store: LightningStore, worker_id: str = "w1", **config: object) -> AttemptedRollout:
    await store.enqueue_rollout({"q": 1}, config=RolloutConfig.model_validate(config))
    claim = await store.dequeue_rollout(worker_id, timeout=2)
    assert claim is not None
    return claim


async def finish(
    store: LightningStore, claim: AttemptedRollout, status: AttemptStatus, outcome: Outcome | None = None
) -> RolloutStatus:
    if outcome is None:
        await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=status)
    else:
        await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=status, outcome=outcome)
    rollout = await store.get_rollout_by_id(claim.rollout_id)
    assert rollout is not None
    return rollout.status


@pytest.mark.contract
async def test_a_whole_life(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout({"q": "é"}, mode=RolloutMode.VAL, metadata={"group": "g1"})
    assert rollout.status is RolloutStatus.QUEUING
    claim = await store.dequeue_rollout("w1")
    assert claim is not None
    assert (claim.input, claim.mode, claim.metadata) == ({"q": "é"}, RolloutMode.VAL, {"group": "g1"})
    assert claim.status is RolloutStatus.PREPARING
    assert claim.attempt.sequence_id == 1
    await store.add_span(make_span(claim))
    running = await store.get_rollout_by_id(rollout.rollout_id)
    assert isinstance(running, AttemptedRollout)
    assert running.status is RolloutStatus.RUNNING
    assert running.attempt.status is AttemptStatus.RUNNING
    attempt = await store.update_attempt(
        rollout.rollout_id, "latest", status=AttemptStatus.SUCCEEDED, outcome=Outcome.TRUNCATED, metadata={"a": 1}
    )
    assert (attempt.outcome, attempt.metadata) == (Outcome.TRUNCATED, {"a": 1})
    (done,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=1)
    assert done.status is RolloutStatus.SUCCEEDED
    assert done.end_time is not None
    statistics = await store.statistics()
    assert statistics["rollouts"] == {s.value: int(s is RolloutStatus.SUCCEEDED) for s in RolloutStatus}
    assert statistics["attempts"] == {s.value: int(s is AttemptStatus.SUCCEEDED) for s in AttemptStatus}
    assert (statistics["total_spans"], statistics["total_workers"]) == (1, 1)


@pytest.mark.contract
@pytest.mark.parametrize("task", [None, 1, 1.5, "text", [1, [2]], {"a": {"b": None}}, True, "\u0000\U0001f600", ""])
async def test_any_json_value_is_a_task(store: LightningStore, task: object) -> None:
    rollout = await store.enqueue_rollout(task)
    stored = await store.get_rollout_by_id(rollout.rollout_id)
    assert stored is not None
    assert stored.input == task


def _deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({1, 2}, "set"),
        (_deep(129), "nested more than 128 deep"),
        ({"a": object()}, "object"),
        (float("nan"), "JSON"),
        ("\ud83d", "surrogates"),
    ],
)
async def test_other_tasks_are_refused_by_name(store: LightningStore, task: object, name: str) -> None:
    with pytest.raises(StoreError, match=name):
        await store.enqueue_rollout(task)


async def test_ids_that_mean_something_in_a_url_are_refused(store: LightningStore) -> None:
    """They would be stored, and then not be found over HTTP, nor could their agents reach the gateway."""
    for name in ("gsm8k/12", "50%", "a?b", "a#b", "..", "latest", "search", "a\nb", "x" * 501, "\ud800"):
        writes = [
            store.enqueue_rollout(1, rollout_id=name),
            store.start_rollout(1, attempt_id=name),
            store.add_resources({}, name),
            store.update_resources(name, {}),
            store.update_worker(name),
        ]
        for write in writes:
            with pytest.raises(StoreError, match=r"cannot be|Unicode|surrogate"):
                await write
    assert (await store.statistics())["total_rollouts"] == 0


async def test_other_ids_are_found_again(store: LightningStore) -> None:
    for name in ("a b", "ü", "50_000", 'q"uote', "a\\b", "x" * 500, "host:1@2"):
        await store.start_rollout(1, rollout_id=name, attempt_id=name, worker_id=name)
        await store.update_resources(name, {})
        assert await store.get_rollout_by_id(name) is not None
        assert await store.get_resources_by_id(name) is not None
        assert (await store.update_worker(name)).current_attempt_id == name
        finished = await store.update_attempt(name, name, status=AttemptStatus.SUCCEEDED)
        assert finished.status is AttemptStatus.SUCCEEDED


@pytest.mark.contract
async def test_enqueue_is_idempotent_by_id(store: LightningStore) -> None:
    first = await store.enqueue_rollout([1], rollout_id="r1")
    assert await store.enqueue_rollout([1], rollout_id="r1") == first
    with pytest.raises(ConflictError, match="another input"):
        await store.enqueue_rollout([2], rollout_id="r1")
    assert (await store.query_rollouts()).total == 1


@pytest.mark.contract
async def test_enqueue_many_is_all_or_none(store: LightningStore) -> None:
    await store.enqueue_rollout("x", rollout_id="taken")
    requests = [EnqueueRolloutRequest(input=n) for n in range(3)]
    with pytest.raises(ConflictError):
        await store.enqueue_many_rollouts([*requests, EnqueueRolloutRequest(input="y", rollout_id="taken")])
    assert (await store.query_rollouts()).total == 1
    assert [r.input for r in await store.enqueue_many_rollouts(requests)] == [0, 1, 2]


@pytest.mark.contract
async def test_a_failing_operation_spares_its_batch(store: LightningStore) -> None:
    """Of operations that are committed together, only the failing ones fail."""
    await store.enqueue_rollout("x", rollout_id="taken")
    bad = EnqueueRolloutRequest(input="y", rollout_id="taken")
    jobs = [store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n), *([bad] * (n % 2))]) for n in range(20)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    assert [isinstance(result, ConflictError) for result in results] == [bool(n % 2) for n in range(20)]
    assert [r.input for r in await store.query_rollouts(sort_by="start_time")] == ["x", *range(0, 20, 2)]
    assert (await store.statistics())["total_rollouts"] == 11


@pytest.mark.contract
async def test_claims_are_first_in_first_out(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(5)])
    claims = await store.dequeue_many_rollouts(3, "w1")
    assert [claim.input for claim in claims] == [0, 1, 2]
    assert [claim.input for claim in await store.dequeue_many_rollouts(3, "w1")] == [3, 4]
    assert await store.dequeue_rollout("w1") is None


@pytest.mark.contract
async def test_a_claim_whose_answer_was_lost_is_handed_out_again(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    first = await store.dequeue_rollout("w1", attempt_id="a1")
    again = await store.dequeue_rollout("w1", attempt_id="a1")
    assert first is not None
    assert again is not None
    assert again.rollout_id == first.rollout_id
    assert again.attempt.attempt_id == "a1"
    assert (await store.query_rollouts(status_in=[RolloutStatus.QUEUING])).total == 2
    await finish(store, first, AttemptStatus.SUCCEEDED)
    with pytest.raises(ConflictError, match="ended"):
        await store.dequeue_rollout("w1", attempt_id="a1")


async def test_start_rollout_is_idempotent(store: LightningStore) -> None:
    first = await store.start_rollout(1, worker_id="w", rollout_id="r", attempt_id="a")
    again = await store.start_rollout(1, worker_id="w", rollout_id="r", attempt_id="a")
    assert again == first
    assert await store.dequeue_rollout("w") is None


async def test_finishing_twice(store: LightningStore) -> None:
    claim = await claim_one(store)
    assert await finish(store, claim, AttemptStatus.FAILED) is RolloutStatus.FAILED
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.outcome is Outcome.AGENT_ERROR
    assert await finish(store, claim, AttemptStatus.FAILED) is RolloutStatus.FAILED
    assert await store.get_latest_attempt(claim.rollout_id) == attempt
    with pytest.raises(ConflictError, match="cannot become succeeded"):
        await finish(store, claim, AttemptStatus.SUCCEEDED)


async def test_retries_by_condition(store: LightningStore) -> None:
    claim = await claim_one(store, max_attempts=2, retry_condition=["failed"])
    start = time.monotonic()
    assert await finish(store, claim, AttemptStatus.FAILED) is RolloutStatus.REQUEUING
    assert await store.dequeue_rollout("w1") is None  # it waits for its back-off
    again = await store.dequeue_rollout("w1", timeout=5)
    assert again is not None
    assert time.monotonic() - start > 0.5
    assert again.rollout_id == claim.rollout_id
    assert again.attempt.sequence_id == 2
    assert await finish(store, again, AttemptStatus.FAILED) is RolloutStatus.FAILED


async def test_infra_failures_do_not_count(store: LightningStore) -> None:
    claim = await claim_one(store)
    for _ in range(3):
        status = await finish(store, claim, AttemptStatus.FAILED, Outcome.INFRA_ERROR)
        assert status is RolloutStatus.REQUEUING
        claim = await store.start_attempt(claim.rollout_id, "w1")
    assert await finish(store, claim, AttemptStatus.FAILED, Outcome.INFRA_ERROR) is RolloutStatus.FAILED
    assert claim.attempt.sequence_id == 4


@pytest.mark.contract
async def test_the_watchdog_gives_up_a_silent_attempt(store: LightningStore) -> None:
    claim = await claim_one(store, unresponsive_seconds=0.2)
    await store.add_span(make_span(claim, "thinking"))
    again = await store.dequeue_rollout("w2", timeout=5)
    assert again is not None
    assert again.rollout_id == claim.rollout_id
    first = (await store.query_attempts(claim.rollout_id))[0]
    assert (first.status, first.outcome) == (AttemptStatus.UNRESPONSIVE, Outcome.INFRA_ERROR)
    assert "thinking" in (first.error or "")
    worker = await store.get_worker_by_id("w1")
    assert worker is not None
    assert worker.status is WorkerStatus.UNKNOWN
    with pytest.raises(ConflictError, match="only the latest attempt counts"):
        await finish(store, claim, AttemptStatus.SUCCEEDED)


async def test_a_slow_worker_may_come_back(store: LightningStore) -> None:
    claim = await claim_one(store, unresponsive_seconds=0.2)
    while (await store.statistics())["attempts"]["unresponsive"] == 0:  # noqa: ASYNC110 - until the watchdog came
        await asyncio.sleep(0.02)
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, last_heartbeat_time=time.time())
    rollout = await store.get_rollout_by_id(claim.rollout_id)
    assert isinstance(rollout, AttemptedRollout)
    assert rollout.status is RolloutStatus.RUNNING
    assert (rollout.attempt.status, rollout.attempt.outcome) == (AttemptStatus.RUNNING, None)
    assert await finish(store, claim, AttemptStatus.SUCCEEDED) is RolloutStatus.SUCCEEDED


async def test_heartbeats_keep_attempts_alive_but_not_for_ever(store: LightningStore) -> None:
    claim = await claim_one(store, unresponsive_seconds=0.8, timeout_seconds=2.0)
    start = time.monotonic()
    status = AttemptStatus.PREPARING
    while status is AttemptStatus.PREPARING:
        await store.update_worker("w1", {"cpu": 0.5})
        await asyncio.sleep(0.05)
        attempt = await store.get_latest_attempt(claim.rollout_id)
        assert attempt is not None
        status = attempt.status
    assert status is AttemptStatus.TIMEOUT
    assert time.monotonic() - start > 1.9
    rollout = await store.get_rollout_by_id(claim.rollout_id)
    assert rollout is not None
    assert rollout.status is RolloutStatus.FAILED


@pytest.mark.contract
async def test_cancelling_reaches_the_runner(store: LightningStore) -> None:
    claim = await claim_one(store)
    await store.update_rollout(claim.rollout_id, status=RolloutStatus.CANCELLED)
    beat = await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, last_heartbeat_time=time.time())
    assert (beat.status, beat.outcome) == (AttemptStatus.CANCELLED, Outcome.CANCELLED)
    worker = await store.get_worker_by_id("w1")
    assert worker is not None
    assert worker.status is WorkerStatus.IDLE
    with pytest.raises(ConflictError):
        await finish(store, claim, AttemptStatus.SUCCEEDED)


async def test_requeuing_by_hand(store: LightningStore) -> None:
    """What a trainer does with the attempts of its own runners after a crash."""
    claim = await claim_one(store)
    await store.add_span(make_span(claim))
    rollout = await store.update_rollout(claim.rollout_id, status=RolloutStatus.REQUEUING)
    assert rollout.status is RolloutStatus.REQUEUING
    again = await store.dequeue_rollout("w2")
    assert again is not None
    assert again.attempt.sequence_id == 2


async def test_transitions_that_the_table_forbids(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout(1)
    for status in (RolloutStatus.PREPARING, RolloutStatus.RUNNING, RolloutStatus.REQUEUING):
        with pytest.raises(ConflictError):
            await store.update_rollout(rollout.rollout_id, status=status)
    claim = await store.start_attempt(rollout.rollout_id)
    with pytest.raises(ConflictError, match="cannot become preparing"):
        await store.start_attempt(rollout.rollout_id)
    await finish(store, claim, AttemptStatus.SUCCEEDED)
    with pytest.raises(ConflictError):
        await store.start_attempt(rollout.rollout_id)


@pytest.mark.contract
async def test_unknown_ids(store: LightningStore) -> None:
    assert await store.get_rollout_by_id("no") is None
    assert await store.get_latest_attempt("no") is None
    assert await store.get_worker_by_id("no") is None
    assert (await store.query_attempts("no")).total == 0
    with pytest.raises(NotFoundError, match="'no'"):
        await store.update_rollout("no", metadata={})
    with pytest.raises(NotFoundError, match="'no'"):
        await store.update_attempt("no", "latest", status=AttemptStatus.RUNNING)
    with pytest.raises(NotFoundError, match="would never end"):
        await store.wait_for_rollouts(rollout_ids=["no"])


@pytest.mark.contract
async def test_claim_and_wait_are_long_polls(store: LightningStore) -> None:
    claim_task = asyncio.ensure_future(store.dequeue_rollout("w1", timeout=5))
    await asyncio.sleep(0.1)
    start = time.perf_counter()
    rollout = await store.enqueue_rollout(1)
    claim = await claim_task
    assert claim is not None
    assert time.perf_counter() - start < 1.0  # milliseconds, on a machine with nothing else to do
    waits = [
        asyncio.ensure_future(store.wait_for_rollouts(rollout_ids=[rollout.rollout_id])),
        asyncio.ensure_future(store.wait_for_any_rollout(rollout_ids=[rollout.rollout_id])),
    ]
    await asyncio.sleep(0.1)
    start = time.perf_counter()
    await finish(store, claim, AttemptStatus.SUCCEEDED)
    for done in await asyncio.gather(*waits):
        assert [r.status for r in done] == [RolloutStatus.SUCCEEDED]
    assert time.perf_counter() - start < 1.0  # milliseconds, on a machine with nothing else to do


async def test_waiting_for_all_or_any(store: LightningStore) -> None:
    claims = [await claim_one(store) for _ in range(3)]
    ids = [claim.rollout_id for claim in claims]
    assert await store.wait_for_rollouts(rollout_ids=ids, timeout=0) == []
    await finish(store, claims[1], AttemptStatus.SUCCEEDED)
    assert [r.rollout_id for r in await store.wait_for_any_rollout(rollout_ids=ids)] == [ids[1]]
    assert [r.rollout_id for r in await store.wait_for_rollouts(rollout_ids=ids, timeout=0.05)] == [ids[1]]
    everything = asyncio.ensure_future(store.wait_for_rollouts(rollout_ids=ids))
    for claim in (claims[0], claims[2]):
        await finish(store, claim, AttemptStatus.SUCCEEDED)
    assert [r.rollout_id for r in await everything] == ids


@pytest.mark.contract
async def test_every_waiting_claimer_is_served_once(store: LightningStore) -> None:
    waiting = [asyncio.ensure_future(store.dequeue_rollout(f"w{n}", timeout=5)) for n in range(20)]
    await asyncio.sleep(0.05)
    for cancelled in waiting[:5]:
        cancelled.cancel()
    await asyncio.gather(*[store.enqueue_rollout(n) for n in range(15)])
    claims = await asyncio.gather(*waiting[5:])
    assert sorted(claim.input for claim in claims if claim) == list(range(15))


@pytest.mark.contract
async def test_filters_sorting_and_pages(store: LightningStore) -> None:
    for n in range(7):
        await store.enqueue_rollout(n, rollout_id=f"r{n}")
    await store.dequeue_many_rollouts(3)
    queued = await store.query_rollouts(status_in=[RolloutStatus.QUEUING], limit=2)
    assert ([r.input for r in queued], queued.total) == ([3, 4], 4)
    page = await store.query_rollouts(sort_by="rollout_id", sort_order="desc", limit=2, offset=1)
    assert ([r.input for r in page], page.total) == ([5, 4], 7)
    either = await store.query_rollouts(status_in=[RolloutStatus.PREPARING], rollout_id_contains="6", filter_logic="or")
    assert [r.input for r in either] == [0, 1, 2, 6]
    assert (await store.query_rollouts(rollout_id_contains="%")).total == 0
    assert (await store.query_rollouts(limit=-1, offset=5)).total == 7
    assert (await store.query_rollouts(limit=0)).total == 7
    assert (await store.query_rollouts(rollout_id_in=[])).total == 0
    with pytest.raises(StoreError, match="Cannot sort by 'input'"):
        await store.query_rollouts(sort_by="input")


async def test_updating_a_rollout(store: LightningStore) -> None:
    rollout = await store.enqueue_rollout(1, metadata={"a": 1})
    config = RolloutConfig(max_attempts=3)
    updated = await store.update_rollout(rollout.rollout_id, input=2, mode=RolloutMode.TEST, config=config)
    assert (updated.input, updated.mode, updated.config, updated.metadata) == (2, RolloutMode.TEST, config, {"a": 1})
    assert (await store.update_rollout(rollout.rollout_id, metadata=None)).metadata == {}
