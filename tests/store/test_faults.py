"""What one client, one attempt or one clock does wrong stays its own affair."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from pathlib import Path

import pytest

from agentlightning.errors import AgentError, ConflictError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.store.database.jobs import Complaints
from agentlightning.store.database.schema import rollouts
from agentlightning.store.database.transaction import Transaction
from agentlightning.store.operations.spans import MAX_SEQUENCE
from agentlightning.store.operations.watchdog import Watchdog
from agentlightning.types import AttemptStatus, EnqueueRolloutRequest, RolloutConfig, RolloutStatus, WorkerStatus
from agentlightning.types.reward import get_reward_value, reward_attributes
from tests.store.builders import make_call, make_segment, make_span


@pytest.mark.parametrize("number", [9223372036854775806, 2**63, MAX_SEQUENCE + 1, -1])
async def test_a_sequence_number_out_of_bounds_is_refused(store: LightningStore, number: int) -> None:
    claim = await store.start_rollout(1)
    span = make_span(claim).model_copy(update={"sequence_id": number})
    with pytest.raises(StoreError, match="sequence_id"):
        await store.add_span(span)
    assert await store.add_span(make_span(claim)) is not None


async def test_an_attempt_whose_numbers_are_used_up_still_records(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    await store.add_span(make_span(claim, "last number").model_copy(update={"sequence_id": MAX_SEQUENCE}))
    await store.add_span(make_span(claim, "after"))
    segments = make_segment("p", None, 0, [1]), make_segment("r", "p", 1, [2], version=1)
    await store.add_calls([make_call(claim, "call", "p", "r", *segments)])
    assert await store.get_next_span_sequence_id(claim.rollout_id, claim.attempt.attempt_id) == MAX_SEQUENCE
    names = [span.name for span in await store.query_spans(claim.rollout_id)]
    assert names == ["last number", "after", "chat policy"]


async def test_a_reward_that_no_float_holds_is_none(store: LightningStore) -> None:
    """Also where somebody wrote it past the emitter."""
    claim = await store.start_rollout(1)
    for value in (10**400, -(10**400)):
        with pytest.raises(AgentError, match="finite"):
            reward_attributes(value)
        await store.add_span(make_span(claim, "big", **{"agentlightning.reward.0.value": value}))
    (record,) = await store.query_records([claim.rollout_id])
    assert [get_reward_value(span) for span in record.spans] == [None, None]


async def test_an_attempt_id_of_another_rollout_is_a_conflict(store: LightningStore) -> None:
    one = await store.start_rollout(1, attempt_id="at-1")
    with pytest.raises(ConflictError, match="at-1"):
        await store.start_rollout(2, attempt_id="at-1")
    assert [rollout.rollout_id for rollout in await store.query_rollouts()] == [one.rollout_id]
    queued = await store.enqueue_rollout(3)
    with pytest.raises(ConflictError, match="at-1"):
        await store.start_attempt(queued.rollout_id, attempt_id="at-1")


@pytest.mark.contract
async def test_ids_taken_meanwhile_are_conflicts_and_leave_nothing(store: LightningStore) -> None:
    """Two that use one attempt_id at the same moment: one gets it."""
    results = await asyncio.gather(
        *(store.start_rollout(n, rollout_id=f"ro-{n}", attempt_id="same") for n in range(8)), return_exceptions=True
    )
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    assert all(isinstance(r, ConflictError) for r in results if isinstance(r, BaseException)), results
    assert len(await store.query_rollouts()) == 1


@pytest.mark.contract
async def test_a_heartbeat_renews_the_attempts_that_it_names(store: LightningStore) -> None:
    """A claim whose answer was lost is nobody's: its lease runs out although its worker lives."""
    configs = [RolloutConfig(unresponsive_seconds=seconds) for seconds in (60.0, 1.0)]
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, config=config) for config in configs])
    held, lost = [await store.dequeue_rollout("w") for _ in range(2)]
    assert held is not None
    assert lost is not None
    claimed = held.attempt.last_heartbeat_time or held.attempt.start_time
    for _ in range(200):
        await store.update_worker("w", attempt_ids=[held.attempt.attempt_id, "unknown"])
        found = await store.get_rollout_by_id(lost.rollout_id)
        assert found is not None
        if found.status is RolloutStatus.REQUEUING:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the lost claim was kept alive")
    attempt = await store.get_latest_attempt(held.rollout_id)
    assert attempt is not None
    assert attempt.last_heartbeat_time is not None
    assert attempt.last_heartbeat_time > claimed
    assert attempt.status is AttemptStatus.PREPARING


@pytest.mark.contract
async def test_a_claim_that_was_repeated_is_not_taken_back(tmp_path: Path) -> None:
    """Cancelled, and claimed again under the same attempt_id before the store had undone it."""
    store = SqliteLightningStore(tmp_path / "store.db")
    for round_ in range(50):
        await store.enqueue_rollout(round_)
        first = asyncio.ensure_future(store.dequeue_rollout("w", attempt_id=f"at-{round_}"))
        await asyncio.sleep(0)
        first.cancel()
        again = await store.dequeue_rollout("w", attempt_id=f"at-{round_}")
        await asyncio.gather(first, return_exceptions=True)
        other = await store.dequeue_rollout("other")
        assert again is not None
        assert other is None, round_
    await store.close()


async def test_worker_records_follow_an_attempt_that_changes_hands(store: LightningStore) -> None:
    claim = await store.start_rollout(1, worker_id="one")
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, worker_id="two")
    one, two = await store.get_worker_by_id("one"), await store.get_worker_by_id("two")
    assert one is not None
    assert two is not None
    assert (one.status, one.current_attempt_id) == (WorkerStatus.IDLE, None)
    assert (two.status, two.current_attempt_id) == (WorkerStatus.BUSY, claim.attempt.attempt_id)


@pytest.mark.parametrize("status", [RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED])
async def test_an_open_rollout_is_ended_by_hand_in_one_call(store: LightningStore, status: RolloutStatus) -> None:
    rollout = await store.enqueue_rollout("never claimed")
    assert (await store.update_rollout(rollout.rollout_id, status=status)).status is status
    assert await store.dequeue_rollout("w") is None
    assert [r.status for r in await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=5.0)] == [status]
    for other in (RolloutStatus.RUNNING, RolloutStatus.REQUEUING, RolloutStatus.FAILED, RolloutStatus.CANCELLED):
        if other is not status:
            with pytest.raises(ConflictError):
                await store.update_rollout(rollout.rollout_id, status=other)


@pytest.mark.parametrize("status", [RolloutStatus.SUCCEEDED, RolloutStatus.FAILED, RolloutStatus.CANCELLED])
@pytest.mark.parametrize("before", [RolloutStatus.RUNNING, RolloutStatus.REQUEUING])
async def test_a_rollout_that_was_begun_is_ended_by_hand_in_one_call(
    store: LightningStore, before: RolloutStatus, status: RolloutStatus
) -> None:
    claim = await store.start_rollout("begun")
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.RUNNING)
    if before is RolloutStatus.REQUEUING:
        await store.update_rollout(claim.rollout_id, status=before)
    found = await store.get_rollout_by_id(claim.rollout_id)
    assert found is not None
    assert found.status is before
    ended = await store.update_rollout(claim.rollout_id, status=status)
    assert ended.status is status
    assert ended.end_time is not None
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.end_time is not None, "what is over has no open attempt"
    assert await store.dequeue_rollout("w") is None
    with pytest.raises(ConflictError):
        await store.update_rollout(claim.rollout_id, status=RolloutStatus.RUNNING)


async def test_unknown_ids_are_value_errors_too(store: LightningStore) -> None:
    with pytest.raises(ValueError, match="'nobody'"):
        await store.update_rollout("nobody", status=RolloutStatus.CANCELLED)
    with pytest.raises(NotFoundError, match="'nobody'"):
        await store.wait_for_rollouts(rollout_ids=["nobody"], timeout=1.0)


@pytest.mark.contract
async def test_sequence_numbers_of_many_attempts_at_once(store: LightningStore) -> None:
    claims = [await store.start_rollout(n) for n in range(2)]
    pairs = [(claim.rollout_id, claim.attempt.attempt_id) for claim in claims]
    assert list(await store.get_many_span_sequence_ids([*pairs, pairs[0]])) == [1, 1, 2]


# ---- clocks --------------------------------------------------------------------------------------------------------


class Clocks:
    """A wall clock that can be set, and one that only goes on."""

    def __init__(self) -> None:
        self.steady = 100.0
        self.offset = 0.0

    async def tick(self, store: SqliteLightningStore, watchdog: Watchdog) -> None:
        def look(tx: Transaction) -> None:
            tx.now += self.offset
            watchdog(tx)

        await store._db.write(look)


@pytest.mark.contract
@pytest.mark.parametrize("jump", [7200.0, -7200.0])
async def test_a_step_of_the_clock_ends_no_attempt(
    tmp_path: Path, jump: float, caplog: pytest.LogCaptureFixture
) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0)
    clocks = Clocks()
    watchdog = Watchdog(lambda: clocks.steady)
    claim = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1800.0), worker_id="w")
    await clocks.tick(store, watchdog)
    clocks.steady, clocks.offset = clocks.steady + 0.5, jump
    await clocks.tick(store, watchdog)
    assert "clock" in caplog.text
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.status is AttemptStatus.PREPARING
    # The attempt still has its half hour, and no more than that.
    clocks.steady, clocks.offset = clocks.steady + 1900.0, jump + 1900.0
    await clocks.tick(store, watchdog)
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.status is AttemptStatus.TIMEOUT
    await store.close()


@pytest.mark.contract
async def test_what_could_not_be_kept_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that is full takes nothing of what the watchdog does: it tries again twice a second, perhaps for hours."""
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0)
    clocks = Clocks()
    watchdog = Watchdog(lambda: clocks.steady)
    claim = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=5.0), worker_id="w")
    await clocks.tick(store, watchdog)

    def on_a_full_disk(tx: Transaction) -> None:
        tx.now += clocks.offset
        watchdog(tx)
        raise StoreUnavailableError("The disk is full.")

    for _ in range(5):
        clocks.steady, clocks.offset = clocks.steady + 10.0, clocks.offset + 10.0
        with pytest.raises(StoreUnavailableError):
            await store._db.write(on_a_full_disk)
    assert caplog.text.count("is given up as timeout") == 1
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.status is AttemptStatus.PREPARING
    await clocks.tick(store, watchdog)
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.status is AttemptStatus.TIMEOUT
    await store.close()


def test_an_outage_is_complained_of_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints()
    for _ in range(3):
        complaints.about(StoreUnavailableError("The disk is full."))
    assert caplog.text.count("The disk is full.") == 1
    assert not caplog.records[0].exc_info
    complaints.about(ValueError("ours"))
    assert caplog.records[1].exc_info


async def test_two_servers_that_notice_a_clock_set_back_move_a_deadline_once(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0)
    clocks = Clocks()
    watchdogs = [Watchdog(lambda: clocks.steady) for _ in range(2)]
    claim = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1800.0), worker_id="w")
    for watchdog in watchdogs:
        await clocks.tick(store, watchdog)
    clocks.steady, clocks.offset = clocks.steady + 0.5, -7200.0
    for watchdog in [*watchdogs, *watchdogs]:
        await clocks.tick(store, watchdog)
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.status is AttemptStatus.PREPARING
    assert attempt.start_time < time.time() - 7190
    await store.close()


async def test_a_step_of_the_clock_ends_no_attempt_that_began_just_before_it(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0)
    clocks = Clocks()
    watchdog = Watchdog(lambda: clocks.steady)
    await clocks.tick(store, watchdog)
    claim = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=1800.0), worker_id="w")
    clocks.steady, clocks.offset = clocks.steady + 0.5, 7200.0
    await clocks.tick(store, watchdog)
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert attempt.status is AttemptStatus.PREPARING
    await store.close()


async def test_what_is_queued_is_claimed_after_the_clock_was_set_back(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0)
    clocks = Clocks()
    watchdog = Watchdog(lambda: clocks.steady)
    clocks.offset = 7200.0
    await clocks.tick(store, watchdog)

    def ahead(tx: Transaction) -> None:  # enqueued while the clock was two hours ahead
        tx.change(rollouts.update().values(available_at=rollouts.c.available_at + 7200.0))

    await store.enqueue_rollout("task")
    await store._db.write(ahead)
    assert await store.dequeue_rollout("w") is None
    clocks.steady, clocks.offset = clocks.steady + 0.5, 0.0
    await clocks.tick(store, watchdog)
    assert await store.dequeue_rollout("w") is not None
    await store.close()


async def test_the_watchdog_does_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=0.01)
    await store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=0.05))
    with sqlite3.connect(store.path) as connection:
        connection.execute("ALTER TABLE attempts RENAME COLUMN deadline TO gone")  # as a damaged file would fail
    with caplog.at_level(logging.ERROR):
        await asyncio.sleep(1.0)
    assert caplog.text.count("The store's watchdog") == 1
    await store.close()
