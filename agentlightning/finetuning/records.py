"""What the server knows: files, uploads, jobs, their events and keys, in one SQLite file.

Every change is one transaction; a change of a job's state is one compare-and-set against `TRANSITIONS`. An event has an
id that follows from what it says, so that saying it again, after a crash, says nothing new. One process owns the file.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.files import open_private
from agentlightning.gateway.exchange import Refusal

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there the second opener is not refused
    fcntl = None

TRANSITIONS: Mapping[str, frozenset[str]] = {
    "queued": frozenset(("validating_files", "paused")),
    "running": frozenset(("queued",)),
    "paused": frozenset(("running",)),
    "succeeded": frozenset(("running", "paused", "queued")),
    "failed": frozenset(("validating_files", "queued", "running", "paused")),
    "cancelled": frozenset(("validating_files", "queued", "running", "paused")),
}
"""The states of a job, each with those that it may follow. A job that is done although it was to pause, or to go on
later, has succeeded."""
FINISHED = ("succeeded", "failed", "cancelled")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (id TEXT PRIMARY KEY, name TEXT, hash TEXT UNIQUE, created_at INTEGER);
CREATE TABLE IF NOT EXISTS files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, sha256 TEXT, bytes INTEGER, filename TEXT,
    purpose TEXT, created_at INTEGER, expires_at INTEGER);
CREATE TABLE IF NOT EXISTS uploads (id TEXT PRIMARY KEY, owner TEXT, body TEXT, status TEXT, created_at INTEGER,
    expires_at INTEGER, file TEXT);
CREATE TABLE IF NOT EXISTS parts (id TEXT PRIMARY KEY, upload TEXT, sha256 TEXT, bytes INTEGER, created_at INTEGER);
CREATE TABLE IF NOT EXISTS jobs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, request TEXT, status TEXT,
    turn INTEGER DEFAULT 0, step INTEGER DEFAULT -1, created_at INTEGER, started_at REAL DEFAULT 0, finished_at INTEGER,
    taken TEXT DEFAULT '{}', trained_tokens INTEGER, result_file TEXT, error TEXT, estimated_finish INTEGER,
    model_deleted INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, job TEXT, created_at INTEGER, level TEXT, type TEXT,
    message TEXT, data TEXT);
CREATE INDEX IF NOT EXISTS events_of_job ON events (job, seq);
CREATE INDEX IF NOT EXISTS parts_of_upload ON parts (upload);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner);
CREATE INDEX IF NOT EXISTS uploads_of_owner ON uploads (owner);
CREATE INDEX IF NOT EXISTS jobs_of_owner ON jobs (owner);
"""
_TOO_MANY = (
    "This key has {:,} {} on record, and may have no more. Delete what can be deleted, or have the server started "
    "with a higher --quota records=NUMBER."
)

Row = dict[str, Any]


class JobEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of a job. `name` is unique among the events of the job."""

    name: str
    message: str
    level: str = "info"
    type: str = "message"
    data: Mapping[str, Any] = {}
    created_at: int | None = None

    def id_of(self, job: str) -> str:
        return f"ftevent-{hashlib.sha256(f'{job}/{self.name}'.encode()).hexdigest()[:24]}"


class Records:
    """The open file. Its methods take milliseconds, so they are called on the event loop."""

    def __init__(self, path: Path, most: int = 100_000) -> None:
        """`most`: rows that an owner may have in a table. Raises ConfigError where another server has the file."""
        self._most = most
        self._lock = open_private(path.with_suffix(".lock"), "a")
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self._lock.close()
                raise ConfigError(
                    f"Another training server has {path.parent}. Stop it, or give this one another folder (--training)."
                ) from None
        open_private(path, "ab").close()
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")  # survives kill -9
        self._connection.executescript(_SCHEMA)

    def define(self, schema: str) -> None:
        """Have these tables too, unless they are there."""
        self._connection.executescript(schema)

    def close(self) -> None:
        self._connection.close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """What is changed within the block is changed together, or not at all; in another such block, with that."""
        if self._connection.in_transaction:
            yield
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # on a full disk SQLite may have ended it by itself
                self._connection.execute("ROLLBACK")
            raise

    # ---- any table -------------------------------------------------------------------------------------------------

    def row(self, sql: str, *values: Any) -> Row | None:
        found = self._connection.execute(sql, values).fetchone()
        return None if found is None else dict(found)

    def rows(self, sql: str, *values: Any) -> list[Row]:
        return [dict(row) for row in self._connection.execute(sql, values)]

    def check_more(self, table: str, owner: str) -> None:
        """Raises `Refusal` where an owner may have no further row in a table. It is called where a request comes in:
        what the server adds by itself, such as a job's results, is never refused."""
        count = (self.row(f"SELECT count(*) AS n FROM {table} WHERE owner = ?", owner) or {"n": 0})["n"]
        if count >= self._most:
            words = _TOO_MANY.format(count, table.replace("_", " "))
            raise Refusal(words, status=429, kind="rate_limit_error", code="too_many_records")

    def add(self, table: str, **values: Any) -> None:
        """Insert a row; one with the same id stays as it is."""
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        self._connection.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(values.values()))

    def change(self, table: str, key: str, **values: Any) -> None:
        sets = ", ".join(f"{name} = ?" for name in values)
        self._connection.execute(f"UPDATE {table} SET {sets} WHERE id = ?", (*values.values(), key))

    def remove(self, table: str, key: str) -> bool:
        """Whether there was one."""
        return self._connection.execute(f"DELETE FROM {table} WHERE id = ?", (key,)).rowcount > 0

    # ---- jobs ------------------------------------------------------------------------------------------------------

    def move(self, job: str, to: str, event: JobEvent | None = None, **values: Any) -> bool:
        """Bring a job into another state, if it may follow the one that it is in: what becomes of the row with it, and
        what is said of it. False if it may not."""
        before = sorted(TRANSITIONS[to])
        sets = ", ".join(["status = ?", "turn = turn + 1", *(f"{name} = ?" for name in values)])
        marks = ", ".join("?" * len(before))
        with self.transaction():
            moved = self._connection.execute(
                f"UPDATE jobs SET {sets} WHERE id = ? AND status IN ({marks})", (to, *values.values(), job, *before)
            ).rowcount
            if moved and event is not None:
                turn = self._connection.execute("SELECT turn FROM jobs WHERE id = ?", (job,)).fetchone()[0]
                self.say(job, [msgspec.structs.replace(event, name=f"{event.name}/{turn}")])
        return bool(moved)

    def say(self, job: str, events: Sequence[JobEvent]) -> None:
        """Add events to a job's; those that are there already stay as they are."""
        with self.transaction():
            for event in events:
                self.add(
                    "events",
                    id=event.id_of(job),
                    job=job,
                    created_at=int(time.time()) if event.created_at is None else event.created_at,
                    level=event.level,
                    type=event.type,
                    message=event.message,
                    data=msgspec.json.encode(event.data).decode(),
                )
