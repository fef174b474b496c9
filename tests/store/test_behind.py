"""A store that is behind: nobody is given up for that, heartbeats get through, and one waits for another no longer
than he must."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import StoreError
from agentlightning.store import (
    LightningStoreClient,
    LightningStoreServer,
    PostgresLightningStore,
    SqliteLightningStore,
)
from agentlightning.store.database.jobs import Job, JobQueue, JobTurn, lag_of
from agentlightning.store.database.transaction import Transaction
from agentlightning.store.operations.watchdog import Watchdog
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import AttemptedRollout, AttemptStatus, EnqueueRolloutRequest, RolloutConfig
from tests.store.builders import make_span

WRITERS = 4
pytestmark = pytest.mark.contract


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SqlLightningStore]:
    opened = (
        SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=0.05)
        if request.param == "sqlite"
        else PostgresLightningStore(request.getfixturevalue("postgres_dsn"), watchdog_seconds=0.05)
    )
    yield opened
    await opened.close()


@pytest.fixture
async def pair(postgres_dsn: str) -> AsyncIterator[list[PostgresLightningStore]]:
    """Two stores on one database, as two machines have them."""
    stores = [PostgresLightningStore(postgres_dsn, watchdog_seconds=0.05) for _ in range(2)]
    yield stores
    for store in stores:
        await store.close()


async def claimed(store: SqlLightningStore, worker: str, seconds: float) -> AttemptedRollout:
    await store.enqueue_many_rollouts(
        [EnqueueRolloutRequest(input=1, config=RolloutConfig(unresponsive_seconds=seconds))]
    )
    claim = await store.dequeue_rollout(worker)
    assert claim is not None
    return claim


def keep_busy(store: SqlLightningStore, seconds: float) -> list[asyncio.Future[None]]:
    """Give each of its writers work for a while."""
    writers = WRITERS if isinstance(store, PostgresLightningStore) else 1
    return [store._db.write(lambda tx: time.sleep(seconds)) for _ in range(writers)]


async def unresponsive(store: SqlLightningStore) -> int:
    return (await store.statistics())["attempts"]["unresponsive"]


@pytest.mark.quick_with("sqlite")
async def test_no_attempt_is_given_up_whose_heartbeat_waits_in_the_store(store: SqlLightningStore) -> None:
    claim = await claimed(store, "w", 1.0)
    waiting: list[asyncio.Future[Any]] = [*keep_busy(store, 1.6)]
    await asyncio.sleep(0.1)  # they have begun
    for _ in range(5):
        waiting.append(asyncio.ensure_future(store.update_worker("w", attempt_ids=[claim.attempt.attempt_id])))
        await asyncio.sleep(0.3)
    await asyncio.gather(*waiting)
    assert await unresponsive(store) == 0


@pytest.mark.slow
async def test_no_attempt_is_given_up_whose_heartbeat_waits_in_another_store(
    pair: list[PostgresLightningStore],
) -> None:
    claim = await claimed(pair[1], "w", 1.0)
    await asyncio.sleep(0.2)  # the stores hear of each other
    busy = keep_busy(pair[1], 2.0)
    await asyncio.sleep(0.3)
    await pair[1].update_attempt(claim.rollout_id, claim.attempt.attempt_id, last_heartbeat_time=time.time())
    await asyncio.gather(*busy)
    await asyncio.sleep(0.2)
    assert await unresponsive(pair[0]) == 0
    await pair[1].close()  # one that is closed holds nobody up
    async with asyncio.timeout(10):
        while not await unresponsive(pair[0]):  # noqa: ASYNC110 - until the watchdog came
            await asyncio.sleep(0.05)


async def test_the_lease_of_a_claim_counts_from_its_answer(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    await store.enqueue_rollout(1)
    busy = keep_busy(store, 0.3)
    await asyncio.sleep(0.1)
    claim, _ = await asyncio.gather(store.dequeue_rollout("w"), *keep_busy(store, 1.5))  # committed together
    assert claim is not None
    await asyncio.gather(*busy)
    heard = claim.attempt.last_heartbeat_time
    await store.update_worker("another")  # heartbeats are done in their order
    attempt = await store.get_latest_attempt(claim.rollout_id)
    assert attempt is not None
    assert (attempt.last_heartbeat_time or 0.0) > (heard or 0.0) + 1.0
    await store.close()


async def test_runners_find_a_store_again_that_stood_still(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0)
    claim = await claimed(store, "w", 10.0)
    passed = 0.0
    watchdog = Watchdog(lambda: passed)

    async def status_after(seconds: float) -> AttemptStatus:
        nonlocal passed
        passed += seconds

        def look(tx: Transaction) -> None:
            tx.now += passed
            watchdog(tx)

        await store._db.write(look)
        attempt = await store.get_latest_attempt(claim.rollout_id)
        assert attempt is not None
        return attempt.status

    assert await status_after(0.0) == AttemptStatus.PREPARING
    assert await status_after(60.0) == AttemptStatus.PREPARING
    assert {await status_after(1.0) for _ in range(19)} == {AttemptStatus.PREPARING}
    assert [await status_after(1.0) for _ in range(2)][-1] == AttemptStatus.UNRESPONSIVE
    await store.close()


async def test_heartbeats_of_many_workers_at_once(store: SqlLightningStore) -> None:
    """Each keeps its own attempts alive, and none of another's."""
    claims = [await claimed(store, f"w{n}", 60.0) for n in range(12)]
    ids = [claim.attempt.attempt_id for claim in claims]
    await asyncio.sleep(0.05)
    began = time.time()
    beats = [store.update_worker(f"w{n}", {"n": n} if n % 2 else {}, [ids[n], ids[-1]]) for n in range(11)]
    answers = await asyncio.gather(*beats, store.update_worker("idle", attempt_ids=ids))
    assert [(w.worker_id, w.status) for w in answers] == [*((f"w{n}", "busy") for n in range(11)), ("idle", "idle")]
    assert [w.heartbeat_stats for w in answers[:3]] == [{}, {"n": 1}, {}]
    attempts = [await store.get_latest_attempt(claim.rollout_id) for claim in claims]
    alive = [a is not None and (a.last_heartbeat_time or 0.0) >= began for a in attempts]
    assert alive == [True] * 11 + [False]
    await store.update_worker("w11")  # without names: all that it has claimed
    last = await store.get_latest_attempt(claims[-1].rollout_id)
    assert last is not None
    assert (last.last_heartbeat_time or 0.0) >= began
    with pytest.raises(StoreError, match="worker_id"):
        await store.update_worker("")
    assert (await store.statistics())["total_workers"] == 13


async def test_nobody_waits_for_the_record_of_a_worker(pair: list[PostgresLightningStore], postgres_dsn: str) -> None:
    psycopg = pytest.importorskip("psycopg")
    claim = await claimed(pair[0], "w", 60.0)
    await pair[0].enqueue_rollout(2)
    with psycopg.connect(postgres_dsn) as other:  # in the middle of its transaction
        other.execute("UPDATE workers SET last_busy_time = 1 WHERE worker_id = 'w'")
        async with asyncio.timeout(10):
            assert await pair[0].dequeue_rollout("w") is not None
            await pair[0].update_worker("w")
            await pair[0].update_attempt(claim.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)


async def test_spans_of_many_attempts_are_numbered_as_of_one_each(store: SqlLightningStore) -> None:
    """However a request mixes them, also where some of them are there already."""
    claims = [await claimed(store, "w", 60.0) for _ in range(3)]
    spans = [make_span(claim, f"s{n}") for n in range(3) for claim in claims]
    await store.add_many_spans([spans[3], spans[8]])
    stored = await store.add_many_spans([*spans, spans[0]])
    assert [(s.name, s.sequence_id) for s in stored] == [
        ("s0", 2), ("s0", 1), ("s0", 2), ("s1", 2), ("s1", 3), ("s2", 3), ("s2", 3),
    ]  # fmt: skip
    for claim in claims:
        found = await store.query_spans(claim.rollout_id)
        assert [span.sequence_id for span in found] == [1, 2, 3]
        assert await store.get_next_span_sequence_id(claim.rollout_id, claim.attempt.attempt_id) == 4


async def test_long_polls_leave_connections_to_others(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    server = LightningStoreServer(store, port=0)
    await server.start()
    client = LightningStoreClient(server.endpoint)
    polls = [asyncio.ensure_future(client.dequeue_rollout(f"w{n}", timeout=20)) for n in range(300)]
    await asyncio.sleep(0.5)
    async with asyncio.timeout(8):
        await client.update_worker("w0")
        await client.statistics()
    for poll in polls:
        poll.cancel()
    await asyncio.gather(*polls, return_exceptions=True)
    await client.close()
    await server.stop()
    await store.close()


async def test_an_event_loop_that_does_not_come_round_counts_as_behind() -> None:
    queue, loop = JobQueue(), asyncio.get_running_loop()
    queue.loops.see(loop)
    queue.loops.ask()
    time.sleep(0.2)  # noqa: ASYNC251 - nothing comes in meanwhile
    assert lag_of(queue) >= 0.2
    await asyncio.sleep(0.1)
    assert lag_of(queue) == 0


async def test_what_goes_first_leaves_room_for_the_rest() -> None:
    queue, loop = JobQueue(), asyncio.get_running_loop()

    def put(turn: JobTurn, count: int) -> None:
        for _ in range(count):
            queue.put(Job(lambda tx: None, None, loop.create_future(), loop, turn=turn))

    put(JobTurn.OTHER, 20)
    put(JobTurn.CLAIM, 20)
    put(JobTurn.ALIVE, 2)
    batch, _ = queue.take(0.0, 8)
    assert [job.turn for job in batch] == [JobTurn.ALIVE] * 2 + [JobTurn.CLAIM] * 3 + [JobTurn.OTHER] * 3
    assert lag_of(queue) > 0
    queue.take(0.0, 100)
    assert lag_of(queue) > 0  # they are not done
    queue.done()
    assert lag_of(queue) == 0


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_attempts_that_end_together_are_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    store, passed = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600.0), 0.0
    watchdog = Watchdog(lambda: passed)
    for _ in range(count):
        await claimed(store, "w", 10.0)

    def look(tx: Transaction) -> None:
        tx.now += passed
        watchdog(tx)

    for passed in (0.0, *range(1, 15)):  # noqa: B007 - the clock of `look`
        await store._db.write(look)
    assert await unresponsive(store) == count
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert (f"{count - 1} more" in warnings[0]) is (count > 1)
    await store.close()
