"""PostgreSQL shared by several stores: no claim twice, news in both, and connections that break."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from alembic import command
from sqlalchemy import text

from agentlightning.errors import StoreUnavailableError
from agentlightning.store import LightningStoreClient, LightningStoreServer, PostgresLightningStore
from agentlightning.store.database.migrate import alembic_config, create_statements, upgrade
from agentlightning.types import AttemptStatus, EnqueueRolloutRequest, RolloutStatus
from agentlightning.types.reward import reward_attributes
from tests.store.builders import make_call, make_segment, make_span
from tests.store.postgres_server import PostgresServer, find_binaries
from tests.store.test_lists import finished

psycopg = pytest.importorskip("psycopg")


@pytest.fixture
async def pair(postgres_dsn: str) -> AsyncIterator[list[PostgresLightningStore]]:
    """Two stores on one database, as two machines have them."""
    stores = [PostgresLightningStore(postgres_dsn, watchdog_seconds=0.1) for _ in range(2)]
    yield stores
    for store in stores:
        await store.close()


@pytest.mark.parametrize(("count", "tasks"), [(8, 50), pytest.param(32, 300, marks=pytest.mark.slow)])
async def test_two_servers_and_many_runners(pair: list[PostgresLightningStore], count: int, tasks: int) -> None:
    servers = [LightningStoreServer(store, port=0) for store in pair]
    for server in servers:
        await server.start()
    clients = [LightningStoreClient(server.endpoint) for server in servers]
    done = Counter[str]()

    async def runner(number: int) -> None:
        store = clients[number % 2]
        while done.total() < tasks:
            claim = await store.dequeue_rollout(f"w{number}", timeout=0.3)
            if claim is None:
                continue
            segments = make_segment("p", None, 0, [1]), make_segment("r", "p", 1, [2], 1)
            await store.add_calls([make_call(claim, "c", "p", "r", *segments)])
            # The other server finishes it.
            await clients[(number + 1) % 2].update_attempt(
                claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED
            )
            done[claim.rollout_id] += 1

    runners = asyncio.gather(*[runner(number) for number in range(count)])
    requests = [EnqueueRolloutRequest(input=n) for n in range(tasks)]
    ids = [r.rollout_id for r in await clients[0].enqueue_many_rollouts(requests)]
    finished = await clients[1].wait_for_rollouts(rollout_ids=ids, timeout=60)
    await asyncio.wait_for(runners, 30)
    assert len(finished) == tasks
    assert done == Counter(ids)
    for store in pair:
        statistics = await store.statistics()
        assert statistics["rollouts"] == {s.value: tasks * (s is RolloutStatus.SUCCEEDED) for s in RolloutStatus}
        assert (statistics["total_attempts"], statistics["total_calls"]) == (tasks, tasks)
    for client, server in zip(clients, servers, strict=True):
        await client.close()
        await server.stop()


async def test_news_travels_between_servers(pair: list[PostgresLightningStore]) -> None:
    waiting = asyncio.ensure_future(pair[0].dequeue_rollout("w", timeout=10))
    await asyncio.sleep(0.5)
    start = time.perf_counter()
    rollout = await pair[1].enqueue_rollout(1)
    claim = await waiting
    assert claim is not None
    watching = asyncio.ensure_future(pair[1].wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=10))
    await asyncio.sleep(0.1)
    await pair[0].update_attempt(rollout.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)
    assert len(await watching) == 1
    assert time.perf_counter() - start < 2


async def test_the_same_ids_at_the_same_moment(pair: list[PostgresLightningStore]) -> None:
    """A request that is repeated on another server while the first one is still under way."""
    for number in range(10):
        new = [store.enqueue_rollout(number, rollout_id=f"r{number}") for store in pair * 3]
        assert len({r.rollout_id for r in await asyncio.gather(*new)}) == 1
        claims = await asyncio.gather(*[store.dequeue_rollout("w", attempt_id=f"a{number}") for store in pair * 3])
        assert {claim.rollout_id for claim in claims if claim is not None} == {f"r{number}"}
    assert (await pair[0].statistics())["total_attempts"] == 10


async def test_broken_connections_are_made_again(pair: list[PostgresLightningStore], postgres_dsn: str) -> None:
    store = pair[0]
    await store.enqueue_rollout(1)
    with psycopg.connect(postgres_dsn, autocommit=True) as admin:
        admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    await asyncio.gather(*[store.enqueue_rollout(n) for n in range(20)])
    assert (await store.query_rollouts()).total == 21
    assert len(await store.dequeue_many_rollouts(100, "w", timeout=10)) == 21
    waiting = asyncio.ensure_future(store.dequeue_rollout("w", timeout=20))
    await asyncio.sleep(1.5)  # the listener connects again
    await pair[1].enqueue_rollout("news")
    assert (await waiting) is not None


@pytest.mark.slow
async def test_what_is_asked_while_the_server_is_away_is_done_once_it_is_back() -> None:
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed")
    server = PostgresServer(binaries, durable=True)
    try:
        server.start()
        patient = PostgresLightningStore(server.address, outage_seconds=120)
        hasty = PostgresLightningStore(server.address, outage_seconds=0.3)
        await patient.enqueue_rollout("before", rollout_id="before")
        server.kill()
        asked = [asyncio.ensure_future(patient.enqueue_rollout(n, rollout_id=f"r{n}")) for n in range(20)]
        looked = asyncio.ensure_future(patient.query_rollouts())
        for refused in (hasty.enqueue_rollout("lost"), hasty.query_rollouts()):
            with pytest.raises(StoreUnavailableError, match="cannot be reached"):
                await refused
        assert not any(task.done() for task in (*asked, looked))
        server.start()
        async with asyncio.timeout(60):
            await asyncio.gather(looked, *asked)
        assert {r.rollout_id for r in await hasty.query_rollouts()} == {"before", *(f"r{n}" for n in range(20))}
        server.kill()
        waiting = asyncio.ensure_future(patient.query_rollouts())
        await asyncio.sleep(0.2)
        async with asyncio.timeout(30):  # what waits for a server does not keep a store from being closed
            await asyncio.gather(patient.close(), hasty.close())
        with pytest.raises(StoreUnavailableError):
            await waiting
    finally:
        server.close()


async def test_what_breaks_every_connection_fails_in_the_end(pair: list[PostgresLightningStore]) -> None:
    """Although the server is there, and others go on meanwhile."""
    store = pair[0]

    def break_it(tx: Any) -> None:
        tx.select(text("SELECT pg_terminate_backend(pg_backend_pid())"))
        tx.select(text("SELECT 1"))

    async def others() -> None:
        for number in itertools.count():
            with suppress(StoreUnavailableError):  # it was in one transaction with it
                await store.enqueue_rollout(number)

    going_on = asyncio.ensure_future(others())
    database: Any = store._db  # pyright: ignore[reportPrivateUsage]
    for ask in (database.write, database.read):
        with pytest.raises(StoreUnavailableError):
            async with asyncio.timeout(30):
                await ask(break_it)
    assert not going_on.done()
    going_on.cancel()


def test_a_server_that_is_not_there() -> None:
    with pytest.raises(StoreUnavailableError, match="cannot be reached"):
        PostgresLightningStore("postgresql://nobody@127.0.0.1:9/nothing")


def _describe(dsn: str) -> set[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name, data_type, is_nullable FROM information_schema.columns"
            " WHERE table_schema = 'public' AND table_name <> 'alembic_version'"
        ).fetchall()
        indexes = connection.execute("SELECT indexdef FROM pg_indexes WHERE schemaname = 'public'").fetchall()
    return {*columns, *(row for row in indexes if "alembic_version" not in row[0])}


def test_migrations_lead_to_the_schema(postgres_dsn: str) -> None:
    with psycopg.connect(postgres_dsn) as connection:
        for statement in create_statements("postgresql"):
            connection.execute(statement)
    created = _describe(postgres_dsn)
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    upgrade("postgresql+psycopg://", None, connect=lambda: psycopg.connect(postgres_dsn))
    assert _describe(postgres_dsn) == created


ODD: list[tuple[dict[str, object], tuple[int | None, str | None]]] = [
    ({"step": 3, "group": "3-1"}, (3, "3-1")),
    ({"step": True, "group": 7}, (None, "7")),
    ({"step": "4"}, (None, None)),
    ({"step": 2**40, "group": "100 %s"}, (None, "100 %s")),
    ({}, (None, None)),
]
"""Metadata, and where a rollout with it is found."""


@pytest.mark.slow
async def test_data_of_before_the_columns_is_found_by_them(postgres_dsn: str) -> None:
    """Schema 0003 reads steps, groups and rewards out of what was stored before."""
    store = PostgresLightningStore(postgres_dsn)
    for number, (metadata, _) in enumerate(ODD):
        given = reward_attributes(number / 4) if number else {}
        await finished(store, f"task {number}", given, run_id="r", metadata=metadata)
    await store.close()
    config = alembic_config("postgresql+psycopg://")
    config.attributes["connect"] = lambda: psycopg.connect(postgres_dsn)
    command.downgrade(config, "0002")
    assert "reward" not in {row[1] for row in _describe(postgres_dsn) if row[0] == "rollouts"}
    store = PostgresLightningStore(postgres_dsn)
    listed = await store.list_rollouts(sort_by="start_time", sort_order="asc")
    assert [(one.step, one.group) for one in listed] == [place for _, place in ODD]
    assert [one.reward for one in listed] == [None, 0.25, 0.5, 0.75, 1.0]
    assert [one.task for one in await store.list_rollouts(sort_by="reward", limit=2)] == ['"task 1"', '"task 2"']
    await store.close()
    migrated = _describe(postgres_dsn)
    with psycopg.connect(postgres_dsn) as connection:
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
        for statement in create_statements("postgresql"):
            connection.execute(statement)
    assert migrated == _describe(postgres_dsn), "a store that was migrated is as a new one"


@pytest.mark.slow
async def test_writers_do_not_lock_each_other_out(pair: list[PostgresLightningStore], postgres_dsn: str) -> None:
    """Both change the same rollouts, each in an order of its own, while their workers say that they are alive."""
    await pair[0].enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(60)])
    claims = [claim for n in range(6) for claim in await pair[0].dequeue_many_rollouts(10, f"w{n}")]
    held = {f"w{n}": [claim.attempt.attempt_id for claim in claims[10 * n : 10 * n + 10]] for n in range(6)}
    rng = random.Random(0)

    async def change(store: PostgresLightningStore) -> None:
        for number in range(6):
            order = rng.sample(claims, len(claims))
            updates = [
                store.update_attempt(c.rollout_id, c.attempt.attempt_id, metadata={"number": number}) for c in order
            ]
            spans = [store.add_many_spans([make_span(c, f"{id(store)}-{number}")]) for c in reversed(order)]
            beats = [store.update_worker(worker, attempt_ids=ids) for worker, ids in held.items()]
            await asyncio.gather(*updates, *beats, *spans)

    await asyncio.gather(*[change(store) for store in pair])
    await asyncio.gather(
        *[
            pair[n % 2].update_attempt(c.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)
            for n, c in enumerate(claims)
        ]
    )
    for store in pair:
        await store.close()  # what a connection has counted is seen when it ends
    with psycopg.connect(postgres_dsn, autocommit=True) as connection:
        found = connection.execute("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        assert found.fetchone() == (0,)
