"""Rows that somebody or a disk has damaged, in both databases: what is asked is answered, or refused in our words."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Double, Integer, LargeBinary, Text

from agentlightning.errors import StoreError
from agentlightning.store import LightningStore, PostgresLightningStore, SqliteLightningStore
from agentlightning.store.database.link import translate
from agentlightning.store.database.schema import metadata
from agentlightning.types import LLM, AttemptStatus, Run, RunEvent, Span
from agentlightning.types.names import REWARD
from scripts.damage import ask_all
from tests.store.builders import make_call, make_segment, make_span

DATABASES = ["sqlite", "postgres"]
VALUES: dict[type[Any], list[Any]] = {
    Text: ["{", "", "[1", "5", '"x"', "[]", "null", '{"a": NaN}', "[" * 3000, "sleeping", "\x7f\u2028"],
    LargeBinary: [b"", b"\x01", b"\xff" * 7, bytes(40)],
    Double: [float("nan"), float("inf"), -1.0, 1e308],
    Integer: [-1, 0, 2**31 - 1],
}
COLUMNS = [
    column
    for table in metadata.sorted_tables
    for column in table.columns
    if "seq" in table.columns and column.name != "seq" and type(column.type) in VALUES
]
SEEDS = 4
"""Each takes its share of the columns."""


async def fill(store: LightningStore) -> list[str]:
    """A bit of everything."""
    await store.begin_run(Run(run_id="run-1", algorithm="GRPO", agent="a", settings={"x": 1}, state={"y": 2}))
    await store.add_run_events([RunEvent(run_id="run-1", event_id="1", kind="note", time=1.0, data={"text": "x"})])
    await store.add_resources({"llm": LLM(endpoint="http://x", model="m")})
    ids: list[str] = []
    for number in range(3):
        claim = await store.start_rollout(input={"number": number}, metadata={"é": number})
        await store.update_worker(f"w{number}", {"cpu": 1}, attempt_ids=[claim.attempt.attempt_id])
        await store.add_many_spans([make_span(claim, "step", number=number)])
        segments = make_segment("p", None, 0, [1]), make_segment("r", "p", 1, [2, 3], 1)
        await store.add_calls([make_call(claim, "c", "p", "r", *segments)])
        ids.append(claim.rollout_id)
    attempt = (await store.query_attempts(ids[0])).items[0]
    await store.update_attempt(ids[0], attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    return ids


Execute = Callable[..., Any]


@pytest.fixture(params=DATABASES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A store, and a connection of somebody else to its database."""
    if request.param == "sqlite":
        store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=3600)
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as database:
            yield store, lambda text, *values: database.execute(text, values)
        return
    dsn = request.getfixturevalue("postgres_dsn")
    import psycopg

    with psycopg.connect(dsn, autocommit=True) as database:
        made = PostgresLightningStore(dsn, watchdog_seconds=3600)
        yield made, lambda text, *values: database.execute(text.replace("?", "%s"), values)


def damage(execute: Execute, column: Column[Any], value: Any) -> bool:
    """False where the database itself refuses it."""
    try:
        # Ids are not the same twice: of one row only.
        execute(
            f"UPDATE {column.table.name} SET {column.name} = ? WHERE seq = (SELECT min(seq) FROM {column.table.name})",
            value,
        )
    except Exception as error:  # of either database
        if "constraint" in str(error):
            return False
        raise
    return True


@pytest.mark.quick_with("sqlite-0")
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_every_damaged_value_is_read_or_refused_in_our_words(opened: Any, seed: int) -> None:
    store, execute = opened
    ids = await fill(store)
    chance = random.Random(seed)
    try:
        for column in COLUMNS[seed::SEEDS]:
            execute(f"CREATE TABLE kept AS SELECT * FROM {column.table.name}")
            for value in chance.sample(VALUES[type(column.type)], 3):
                if damage(execute, column, value):
                    for words in await ask_all(store, ids):
                        assert "Traceback" not in words
            execute(
                f"UPDATE {column.table.name} SET {column.name} = kept.{column.name} "
                f"FROM kept WHERE kept.seq = {column.table.name}.seq"
            )
            execute("DROP TABLE kept")
        assert await ask_all(store, ids) == [], "all is whole again"
    finally:
        await store.close()


@pytest.mark.contract
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [
        ("rollouts", "input", "{"),
        ("rollouts", "metadata", "[1"),
        ("rollouts", "status", "sleeping"),
        ("attempts", "status", ""),
    ],
)
async def test_the_words_say_what_holds_it_and_what_to_do(opened: Any, table: str, column: str, value: str) -> None:
    store, execute = opened
    await fill(store)
    try:
        execute(f"UPDATE {table} SET {column} = ?", value)
        with pytest.raises(StoreError, match=r"damaged.*repair|cannot be read.*(\.recover|backup)"):
            await store.query_rollouts()
    finally:
        await store.close()


JSON = {
    "rollouts": ["input", "metadata"],
    "attempts": ["metadata", "rewards"],
    "spans": ["attributes", "rest"],
    "calls": ["info"],
    "resources": ["resources"],
    "runs": ["settings", "state"],
    "run_events": ["data"],
    "workers": ["heartbeat_stats"],
}


@pytest.mark.contract
async def test_a_damaged_value_is_named_by_table_column_and_row(opened: Any) -> None:
    store, execute = opened
    ids = await fill(store)
    ended = (await store.query_attempts(ids[0])).items[0].attempt_id
    given = {f"{REWARD}.0.value": 1.0}
    late = Span.from_attributes(rollout_id=ids[0], attempt_id=ended, name="late", attributes=given)
    try:
        for table, columns in JSON.items():
            for column in columns:
                execute(f"CREATE TABLE kept AS SELECT * FROM {table}")
                execute(f"UPDATE {table} SET {column} = '[1'")
                words = await ask_all(store, ids)
                if column == "rewards":
                    with pytest.raises(StoreError) as refused:
                        await store.add_many_spans([late])
                    words = [str(refused.value)]
                named = f"{table}.{column} of '"
                assert any(named in said and "is damaged in the store" in said for said in words), (named, words)
                execute(f"UPDATE {table} SET {column} = kept.{column} FROM kept WHERE kept.seq = {table}.seq")
                execute("DROP TABLE kept")
    finally:
        await store.close()


@pytest.mark.parametrize("code", ["XX001", "XX002"])
def test_what_postgresql_itself_finds_damaged_is_no_outage(code: str) -> None:
    errors = pytest.importorskip("psycopg.errors")
    assert "backup" in str(translate(errors.lookup(code)("invalid page in block 3 of relation base/5/16402")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("parent_id = 'r'", "continues itself"),
        ("parent_keep = 2147483647, parent_id = 'q'", "keeps 2147483647"),
        ("parent_keep = -1, parent_id = 'q'", "keeps -1"),
        ("parent_id = 'none'", "is missing"),
    ],
)
async def test_segments_that_no_calls_made_cost_neither_time_nor_memory(opened: Any, change: str, words: str) -> None:
    store, execute = opened
    ids = await fill(store)
    try:
        execute(
            "INSERT INTO segments (attempt_id, segment_id, parent_keep, ids) "
            "SELECT attempt_id, 'q', 0, ids FROM segments WHERE segment_id = 'p'"
        )
        execute(f"UPDATE segments SET {change} WHERE segment_id = 'p'")
        with pytest.raises(StoreError, match=words):
            await store.query_calls(ids)
    finally:
        await store.close()
