"""Files that a disk has damaged: read as far as they can be, or refused with an error of ours that says what to do."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from agentlightning.errors import ModelError, StoreError
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import SqliteLightningStore
from agentlightning.store.operations.calls import CallRow, CallTable, assemble
from scripts.damage import damaged, read_all
from tests.store.test_damaged_rows import fill


async def a_store(path: Path) -> None:
    store = SqliteLightningStore(path)
    for number in range(3):
        claim = await store.start_rollout(input={"number": number}, metadata={"é": number})
        await store.update_worker(f"w{number}", {"cpu": 1}, attempt_ids=[claim.attempt.attempt_id])
    await store.close()


@pytest.mark.parametrize("seed", range(12))
async def test_a_damaged_database_is_read_or_refused(tmp_path: Path, seed: int) -> None:
    await a_store(tmp_path / "whole.db")
    chance = random.Random(seed)
    for number in range(4):
        (tmp_path / f"{number}.db").write_bytes(damaged((tmp_path / "whole.db").read_bytes(), chance))
        await read_all(tmp_path / f"{number}.db")


PROGRAMS = {
    "view": ["ALTER TABLE runs RENAME TO r", "CREATE VIEW runs AS SELECT r.* FROM r, (WITH RECURSIVE n(x) AS "
             "(SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x FROM n)"],
    "trigger": ["CREATE TRIGGER t AFTER UPDATE ON runs BEGIN DELETE FROM spans; END"],
    "table": ["ALTER TABLE rollouts ADD seconds TEXT AS (hex(zeroblob(500000000)))"],
    "table 'rollouts": ["ALTER TABLE rollouts ADD seconds TEXT CHECK (seconds LIKE '%a%a%a%a%b')"],
    "table 'searched": ["CREATE VIRTUAL TABLE searched USING fts5(runs)"],
    "index": ["CREATE INDEX odd ON rollouts (hex(input))"],
    "index 'where": ["CREATE INDEX 'where' ON rollouts (seq) WHERE abs(seq) IS NOT NULL"],
}  # fmt: skip


@pytest.mark.parametrize("kind", PROGRAMS)
async def test_a_store_with_programs_of_its_own_is_refused(kind: str, tmp_path: Path) -> None:
    await a_store(tmp_path / "store.db")
    with closing(sqlite3.connect(tmp_path / "store.db")) as connection:
        for statement in PROGRAMS[kind]:
            connection.execute(statement)
        connection.commit()
    with pytest.raises(StoreError, match=f"has the {kind}"):
        SqliteLightningStore(tmp_path / "store.db")


@pytest.mark.parametrize("end", ["", ".lock", "-journal", "-wal", "-shm"])
async def test_a_named_pipe_beside_a_store_holds_nobody_up(end: str, tmp_path: Path) -> None:
    await a_store(tmp_path / "store.db")
    place = tmp_path / f"store.db{end}"
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    with pytest.raises(StoreError, match="is no file"):
        SqliteLightningStore(tmp_path / "store.db")


@pytest.mark.parametrize("column", ["rollout_id", "attempt_id"])
async def test_a_call_that_an_index_finds_by_an_id_that_it_lacks(tmp_path: Path, column: str) -> None:
    """As the fuzzer met it: a bit of the id turned in the table, and not in the index that leads there."""
    store = SqliteLightningStore(tmp_path / "store.db")
    ids = await fill(store)
    await store.close()
    with sqlite3.connect(tmp_path / "store.db") as database:
        names = ", ".join(CallRow._fields)
        rows = [CallRow._make(row) for row in database.execute(f"SELECT {names} FROM calls ORDER BY seq")]
    database.close()
    assert rows
    turned = [row._replace(**{column: f"{getattr(row, column)}{{"}) for row in rows]
    segments = {row.attempt_id: [] for row in rows}
    with pytest.raises(StoreError, match="index"):
        assemble(CallTable(turned, segments), ids)


@pytest.mark.parametrize("value", ["{", "", None, "[1", b"\xff\xfe", '{"a": 1'])
async def test_a_damaged_value_is_a_store_error(tmp_path: Path, value: object) -> None:
    await a_store(tmp_path / "store.db")
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("UPDATE rollouts SET metadata = ?, input = coalesce(?, '{')", (value, value))
    database.close()
    store = SqliteLightningStore(tmp_path / "store.db")
    with pytest.raises(StoreError):
        await store.query_rollouts()
    await store.close()


@pytest.mark.parametrize("value", ["sleeping", "", "5"])
async def test_a_status_that_there_is_not_is_a_store_error(tmp_path: Path, value: str) -> None:
    await a_store(tmp_path / "store.db")
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.execute("PRAGMA ignore_check_constraints=ON")
        database.execute("UPDATE attempts SET status = ?", (value,))
    database.close()
    store = SqliteLightningStore(tmp_path / "store.db")
    with pytest.raises(StoreError, match="recover"):
        await store.query_rollouts()
    await store.close()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "agentlightning.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"5", b"[]", b'{"a": '])
def test_a_damaged_model_is_a_model_error(tmp_path: Path, name: str, content: bytes) -> None:
    shutil.copytree(resolve_model("calc"), tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(ModelError):
        load_rendering(str(tmp_path / "model"))
