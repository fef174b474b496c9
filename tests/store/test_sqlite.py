"""The SQLite file: opening, owning, migrating, and what happens when the disk or the file fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store import InMemoryLightningStore, SqliteLightningStore
from agentlightning.store.database import migrate
from agentlightning.store.database.migrate import alembic_config, create_statements, upgrade
from agentlightning.store.database.schema import HEAD
from agentlightning.types import AttemptedRollout, AttemptStatus, RolloutStatus


async def test_what_was_acknowledged_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "store.db"
    store = SqliteLightningStore(path)
    rollout = await store.enqueue_rollout({"q": 1})
    await store.close()
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.enqueue_rollout(1)
    again = SqliteLightningStore(path, power_safe=True)
    assert await again.get_rollout_by_id(rollout.rollout_id) == rollout
    await again.close()


async def test_opening_is_fast(tmp_path: Path) -> None:
    seconds = []
    for number in range(3):
        start = time.perf_counter()
        store = SqliteLightningStore(tmp_path / f"{number}.db")
        seconds.append(time.perf_counter() - start)
        await store.close()
    assert min(seconds) < 0.15


@pytest.mark.slow
async def test_one_process_owns_the_file(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    with pytest.raises(StoreError, match=r"already open \(process \d+\).*agl store.*LightningStoreClient"):
        SqliteLightningStore(tmp_path / "store.db")
    code = f"from agentlightning.store import *; SqliteLightningStore({str(tmp_path / 'store.db')!r})"
    result = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert "already open" in result.stderr
    await store.close()
    await SqliteLightningStore(tmp_path / "store.db").close()


async def test_the_in_memory_store_leaves_nothing_behind() -> None:
    store = InMemoryLightningStore()
    assert os.path.exists(store.folder)  # noqa: ASYNC240 - a moment of a test
    await store.enqueue_rollout(1)
    await store.close()
    assert not os.path.exists(store.folder)  # noqa: ASYNC240 - a moment of a test


async def test_several_event_loops_share_a_store(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    seen: list[object] = []

    def runner() -> None:
        async def work() -> None:
            for _ in range(10):
                claim = await store.dequeue_rollout("w", timeout=5)
                assert claim is not None
                seen.append(claim.input)
                await store.update_attempt(claim.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)

        asyncio.run(work())

    threads = [threading.Thread(target=runner) for _ in range(3)]
    for thread in threads:
        thread.start()
    rollouts = [await store.enqueue_rollout(n) for n in range(30)]
    done = await store.wait_for_rollouts(rollout_ids=[r.rollout_id for r in rollouts], timeout=10)
    assert len(done) == 30
    assert sorted(map(str, seen)) == sorted(map(str, range(30)))
    await asyncio.gather(*[asyncio.to_thread(thread.join) for thread in threads])
    await store.close()


async def test_a_cancelled_claim_is_undone(tmp_path: Path) -> None:
    """A caller that is cancelled while its claim is on the way leaves no stranded rollout."""
    store = SqliteLightningStore(tmp_path / "store.db")
    await store.enqueue_rollout(1)
    for _ in range(10):
        claim = asyncio.ensure_future(store.dequeue_rollout("w1"))
        await asyncio.sleep(0)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
    taken = await store.dequeue_rollout("w2", timeout=2)
    assert taken is not None
    assert taken.attempt.sequence_id == 1
    statistics = await store.statistics()
    assert statistics["total_attempts"] == 1
    await store.close()


async def test_a_file_that_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("This is no database at all. " * 50)
    with pytest.raises(StoreError, match="is no store"):
        SqliteLightningStore(tmp_path / "text.db")
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE notes (x)")
    other.close()
    with pytest.raises(StoreError, match="not one of a store"):
        SqliteLightningStore(tmp_path / "other.db")


async def test_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    await asyncio.gather(*[store.enqueue_rollout({"text": "x" * 500}) for _ in range(100)])
    await store.close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    with pytest.raises(StoreError, match="damaged"):
        await _use(path)


async def _use(path: Path) -> None:
    store = SqliteLightningStore(path)
    try:
        await store.enqueue_rollout(1)
    finally:
        await store.close()


async def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    """SQLite's own limit on a file's size gives the very error that a full disk gives."""
    store = SqliteLightningStore(tmp_path / "store.db")
    kept = await store.enqueue_rollout("before")
    await store._db.write(lambda tx: _set_max_pages(store, 1))  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    jobs = [store.enqueue_rollout("x" * 100_000) for _ in range(20)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    assert failed
    assert all(isinstance(error, StoreError) and "disk is full" in str(error) for error in failed)
    await store._db.write(lambda tx: _set_max_pages(store, 2**30))  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    after = await store.enqueue_rollout("after")
    stored = await store.query_rollouts(limit=-1)
    assert {kept.rollout_id, after.rollout_id} <= {r.rollout_id for r in stored}
    assert len(stored) == 2 + len(results) - len(failed) == (await store.statistics())["total_rollouts"]
    await store.close()


def _set_max_pages(store: SqliteLightningStore, pages: int) -> None:
    store._db._writer.execute(f"PRAGMA max_page_count={pages}")  # pyright: ignore


async def test_a_locked_file(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db", busy_seconds=0.1)
    await store.enqueue_rollout(1)
    intruder = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    intruder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="keeps the file locked"):
        await store.enqueue_rollout(2)
    intruder.execute("ROLLBACK")
    intruder.close()
    await store.enqueue_rollout(3)
    assert [r.input for r in await store.query_rollouts()] == [1, 3]
    await store.close()


async def test_living_runners_survive_a_restart_of_the_store(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    claim = await store.start_rollout(1, worker_id="w")
    await store._db.write(lambda tx: _age(store))  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    await store.close()
    again = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=0.02)
    await asyncio.sleep(0.2)
    rollout = await again.get_rollout_by_id(claim.rollout_id)
    assert rollout is not None
    assert rollout.status is RolloutStatus.PREPARING
    await again.close()


def _age(store: SqliteLightningStore) -> None:
    store._db._writer.execute("UPDATE attempts SET deadline = deadline - 1000")  # pyright: ignore


def _schema(path: Path) -> set[object]:
    """Tables by their columns, because a column that was added later is written elsewhere in their text."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        indexes = connection.execute("SELECT sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")
        found: set[object] = {"".join(sql.split()).replace('"', "") for (sql,) in indexes}
        for (table,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
            found |= {(table, *column[1:]) for column in columns if table != "alembic_version"}
    return found


def test_migrations_lead_to_the_schema(tmp_path: Path) -> None:
    script = ScriptDirectory.from_config(alembic_config("sqlite://"))
    assert script.get_heads() == [HEAD]
    upgrade(f"sqlite:///{tmp_path / 'migrated.db'}", None)
    created = sqlite3.connect(tmp_path / "created.db")
    for statement in create_statements("sqlite"):
        created.execute(statement)
    created.commit()
    created.close()
    assert _schema(tmp_path / "migrated.db") == _schema(tmp_path / "created.db")


NEXT = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "next", "0006", None, None


def upgrade() -> None:
    op.add_column("workers", sa.Column("nickname", sa.Text(), server_default="none"))
"""


async def test_an_older_database_is_migrated_when_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one more migration, as a later version would bring it."""
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    claim = await store.start_rollout("task", worker_id="w")
    await store.close()
    shutil.copytree(migrate.MIGRATIONS, tmp_path / "migrations")
    (tmp_path / "migrations" / "versions" / "next.py").write_text(NEXT)
    monkeypatch.setattr(migrate, "MIGRATIONS", tmp_path / "migrations")
    monkeypatch.setattr(migrate, "HEAD", "next")
    store = SqliteLightningStore(path)
    found = await store.get_rollout_by_id(claim.rollout_id)
    assert isinstance(found, AttemptedRollout)
    assert found.attempt.attempt_id == claim.attempt.attempt_id
    await store.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT nickname FROM workers").fetchall() == [("none",)]
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("next",)]


async def test_a_store_of_the_first_schema_is_opened_with_its_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    command.upgrade(alembic_config(f"sqlite:///{path}"), "0001")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        columns = "rollout_id, input, status, start_time, available_at, attempts, failures, infra_failures"
        connection.execute(f"INSERT INTO rollouts ({columns}) VALUES ('old', '1', 'queuing', 1.0, 1.0, 0, 0, 0)")
        connection.commit()
    store = SqliteLightningStore(path)
    (found,) = await store.query_rollouts()
    assert (found.rollout_id, found.run_id) == ("old", None)
    claim = await store.dequeue_rollout("w", run_id="a-run")
    assert claim is not None
    assert claim.rollout_id == "old"
    assert len(await store.query_runs()) == 0
    await store.close()


async def test_without_alembic_an_older_store_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command.upgrade(alembic_config(f"sqlite:///{tmp_path / 'old.db'}"), "0001")
    monkeypatch.setitem(sys.modules, "alembic", None)
    await SqliteLightningStore(tmp_path / "new.db").close()  # needs none
    with pytest.raises(ConfigError, match=r"needs the package 'alembic'.*migrations"):
        SqliteLightningStore(tmp_path / "old.db")


async def test_a_database_from_the_future_is_refused(tmp_path: Path) -> None:
    await SqliteLightningStore(tmp_path / "store.db").close()
    connection = sqlite3.connect(tmp_path / "store.db")
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="newer version of agentlightning"):
        SqliteLightningStore(tmp_path / "store.db")
