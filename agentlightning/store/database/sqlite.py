"""The SQLite database of the embedded store: one writer thread with group commit, and readers beside it.

Promises: an operation's result is delivered after its commit; an operation that fails leaves no trace and does not
disturb the others of its batch; one process at a time owns a file. Knows operations, not what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from sqlalchemy.sql import ClauseElement

from agentlightning.errors import AgentLightningError, ConflictError, StoreError, StoreUnavailableError
from agentlightning.files import open_private
from agentlightning.store.database.counters import write_counters
from agentlightning.store.database.jobs import (
    Complaints,
    Job,
    JobQueue,
    JobTurn,
    Tick,
    Watch,
    closed_error,
    deliver,
    lag_of,
    submit,
)
from agentlightning.store.database.migrate import prepare_sqlite
from agentlightning.store.database.transaction import (
    DIALECTS,
    Changes,
    Ids,
    Parameters,
    Row,
    Statement,
    TransactionOperation,
)

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind; there the second opener is not refused
    fcntl = None

logger = logging.getLogger(__name__)
T = TypeVar("T")

sqlite3.register_adapter(Ids, json.dumps)

BUSY_SECONDS = 5.0
MAX_BATCH = 512
"""Operations per commit."""
OLDEST_SQLITE = (3, 35, 0)


class SqliteTransaction:
    """The `Transaction` of a SQLite connection. `wrote` tells whether it may have changed anything."""

    __slots__ = ("_connection", "changes", "now", "wrote")

    def __init__(self, connection: sqlite3.Connection):
        self._connection = connection
        self.changes = Changes()
        self.now = time.time()
        self.wrote = False

    def row(self, statement: Statement, parameters: Parameters) -> Row | None:
        return self._connection.execute(statement.text("sqlite"), parameters).fetchone()

    def rows(self, statement: Statement, parameters: Parameters) -> list[Row]:
        return self._connection.execute(statement.text("sqlite"), parameters).fetchall()

    def run(self, statement: Statement, parameters: Parameters) -> int:
        self.wrote = True
        return self._connection.execute(statement.text("sqlite"), parameters).rowcount

    def many(self, statement: Statement, parameters: Sequence[Parameters]) -> int:
        self.wrote = True
        return self._connection.executemany(statement.text("sqlite"), parameters).rowcount if parameters else 0

    def each(self, statement: Statement, parameters: Sequence[Parameters]) -> list[int]:
        return [self.run(statement, one) for one in parameters]

    def select(self, element: ClauseElement) -> list[Row]:
        return self._execute(element).fetchall()

    def change(self, element: ClauseElement) -> int:
        self.wrote = True
        return self._execute(element).rowcount

    def _execute(self, element: ClauseElement) -> sqlite3.Cursor:
        compiled = element.compile(dialect=DIALECTS["sqlite"], compile_kwargs={"render_postcompile": True})
        return self._connection.execute(str(compiled), compiled.params or {})


class SqliteDatabase:
    """An open SQLite file.

    `on_commit` hears of changes, in the writer's thread; `tick` is an operation that runs every `tick_seconds`.
    """

    dialect = "sqlite"

    def __init__(
        self,
        path: Path,
        *,
        synchronous: str,
        on_commit: Callable[[Changes], None],
        tick: Watch,
        tick_seconds: float,
        busy_seconds: float = BUSY_SECONDS,
        readers: int = 2,
    ):
        self.path = path
        self._on_commit = on_commit
        self._tick = tick
        self._tick_seconds = tick_seconds
        self._synchronous = synchronous
        self._busy_seconds = busy_seconds
        self._writes = JobQueue()
        self._reads = JobQueue()
        self._complaints = Complaints()
        self._closed = False
        self._lock = _acquire(path)
        try:
            with translated(path):
                prepare_sqlite(path)
                self._writer = self._connect()
                self._readers = [self._connect(read_only=True) for _ in range(readers)]
        except BaseException:
            self._release()
            raise
        self._threads = [threading.Thread(target=self._write_loop, name="agl-store-writer", daemon=True)]
        for number, reader in enumerate(self._readers):
            name = f"agl-store-reader-{number}"
            self._threads.append(threading.Thread(target=self._read_loop, args=(reader,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()

    def write(
        self,
        operation: TransactionOperation[T],
        undo: Callable[[T], None] | None = None,
        rollout_ids: Collection[str] = (),
        turn: JobTurn = JobTurn.OTHER,
        lane: str | None = None,
    ) -> asyncio.Future[T]:
        """Run an operation that changes something; the future resolves after the commit.

        `undo` is called with the result if the future was cancelled in the meantime. `rollout_ids` are those that the
        operation may change; a database with several writers locks them first. `turn` says what goes before others;
        those of one `lane` are done one after another.
        """
        if self._closed:
            raise closed_error()
        return submit(self._writes, operation, undo, turn=turn)

    def read(self, operation: TransactionOperation[T]) -> asyncio.Future[T]:
        """Run an operation that changes nothing; it sees every write that was acknowledged before."""
        if self._closed:
            raise closed_error()
        return submit(self._reads, operation)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._writes.end()
        self._reads.end()
        await asyncio.to_thread(self._join)

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        self._writes.refuse()
        self._reads.refuse()
        for connection in (*self._readers, self._writer):
            connection.close()
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _connect(self, *, read_only: bool = False) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False, cached_statements=256
        )
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={self._synchronous}")
        connection.execute("PRAGMA cache_size=-16384")
        connection.execute("PRAGMA wal_autocheckpoint=4000")
        connection.execute("PRAGMA temp_store=MEMORY")
        if read_only:
            connection.execute("PRAGMA query_only=ON")
        return connection

    # ---- the writer's thread ---------------------------------------------------------------------------------------

    def _write_loop(self) -> None:
        next_tick = time.monotonic()
        open_ = True
        while open_:
            batch, open_ = self._writes.take(next_tick - time.monotonic(), MAX_BATCH)
            if batch:
                self._commit_batch(batch)
                self._writes.done()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._tick_seconds
                self._run_tick()

    def _commit_batch(self, batch: Sequence[Job]) -> None:
        try:
            with translated(self.path):
                changes = self._transact(batch)
        except StoreError as error:
            for job in batch:
                job.error = error
        else:
            self._on_commit(changes)
        deliver(batch)

    def _transact(self, batch: Sequence[Job], *, savepoints: bool = False) -> Changes:
        """Run a batch in one transaction. Raises, with everything rolled back, when the transaction itself fails.

        Operations check before they write, so one that fails after it wrote is rare. Only then is a batch rolled back
        and run again with a savepoint around each operation: two more statements, and each one hands the GIL over.
        """
        changes = Changes()
        connection = self._writer
        connection.execute("BEGIN IMMEDIATE")
        try:
            for job in batch:
                if not self._run_job(job, changes, savepoints):
                    connection.execute("ROLLBACK")
                    return self._transact(batch, savepoints=True)
            write_counters(SqliteTransaction(connection), "", changes.counts)
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        return changes

    def _run_job(self, job: Job, changes: Changes, savepoint: bool) -> bool:
        """False if the operation failed and left something behind."""
        connection = self._writer
        tx = SqliteTransaction(connection)
        job.error = None
        if savepoint:
            connection.execute("SAVEPOINT op")
        try:
            job.result = job.operation(tx)
        except Exception as error:  # the caller's: it must reach the caller, whatever it is, and not end the thread
            # A full disk and its like roll the whole transaction back, and then the whole batch has failed.
            if isinstance(error, sqlite3.Error) and (not connection.in_transaction or _is_fatal(error)):
                raise
            if tx.wrote and not savepoint:
                return False
            job.error = translate(error, self.path)
            if savepoint:
                connection.execute("ROLLBACK TO op")
        else:
            changes.merge(tx.changes)
        if savepoint:
            connection.execute("RELEASE op")
        return True

    def _run_tick(self) -> None:
        self._writes.loops.ask()
        loop_free = Tick(functools.partial(self._tick, lag=lag_of(self._writes)))
        try:
            with translated(self.path):
                changes = self._transact([loop_free])
            if loop_free.error is not None:
                raise loop_free.error
        except Exception as error:  # the watchdog is long-lived: what failed now is tried again at the next tick
            self._complaints.about(error)
        else:
            self._on_commit(changes)

    # ---- a reader's thread -----------------------------------------------------------------------------------------

    def _read_loop(self, connection: sqlite3.Connection) -> None:
        while job := self._reads.next():
            try:
                with translated(self.path):
                    connection.execute("BEGIN")
                    try:
                        job.result = job.operation(SqliteTransaction(connection))
                    finally:
                        connection.execute("COMMIT")
            except Exception as error:  # the caller's: it must reach the caller and not end the thread
                job.error = error
            deliver((job,))


def _acquire(path: Path) -> IO[str] | None:
    """The advisory lock that makes this process the owner of the file. Released with the process, however it ends."""
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        oldest = ".".join(map(str, OLDEST_SQLITE))
        raise StoreError(
            f"SQLite {sqlite3.sqlite_version} is too old; the store needs {oldest} or later. Use a newer Python build."
        )
    lock_path = path.with_name(path.name + ".lock")
    for file in (path, lock_path, *(path.with_name(path.name + end) for end in ("-journal", "-wal", "-shm"))):
        if file.exists() and not file.is_file():  # SQLite would wait for a named pipe
            raise StoreError(f"'{file}' is no file. Take it away, or give the store another place.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # SQLite gives its other files the same permissions
            open_private(path, "ab").close()
        lock = open_private(lock_path, "a+")
    except OSError as error:
        raise StoreError(
            f"Cannot write to the directory of the store '{path}': {error.strerror}. "
            "Choose a directory that you may write to."
        ) from error
    if fcntl is None:
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise StoreUnavailableError(
            f"The store '{path}' is already open (process {owner}), and one process owns a SQLite store. If that "
            "is a command that only looks at it, try again when it has ended. For a second training give "
            "another folder (run_dir=…, --run-dir). A run that goes on is looked at with `agl show` and "
            f"`agl watch`. To share a store, serve it from the start (`agl store --path {path}`) and connect with "
            "LightningStoreClient(url)."
        ) from error
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


_NEXT_STEPS = {
    "SQLITE_BUSY": "Another program keeps the file locked; close it (a database browser, a backup) and try again.",
    "SQLITE_LOCKED": "Another program keeps the file locked; close it (a database browser, a backup) and try again.",
    "SQLITE_FULL": "The disk is full. Nothing that was acknowledged is lost; free some space and try again.",
    "SQLITE_IOERR": "The disk failed to read or write. Check the disk and its free space, then try again.",
    "SQLITE_READONLY": "The file or its directory may not be written to. Change the permissions or choose another.",
    "SQLITE_CANTOPEN": "The file cannot be opened. Check the path and its permissions.",
    "SQLITE_CORRUPT": "The file is damaged. Keep a copy, then try `sqlite3 FILE .recover`, or choose another path.",
    "SQLITE_NOTADB": "The file is no store, which is a SQLite database. Give a run's folder, or another path.",
}
_FATAL = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_BUSY")


def _error_name(error: sqlite3.Error) -> str:
    # Errors that Python itself raises (a wrong parameter, a closed connection) carry no code.
    return error.sqlite_errorname if "sqlite_errorname" in error.__dict__ else ""


def _is_fatal(error: sqlite3.Error) -> bool:
    return _error_name(error).startswith(_FATAL)


def translate(error: Exception, path: Path) -> Exception:
    """SQLite's errors as `StoreError`s that say what to do next; all others as they are."""
    translation: Exception
    if isinstance(error, AgentLightningError):  # some are ValueErrors, too
        return error
    if isinstance(error, sqlite3.IntegrityError):
        translation = ConflictError(f"This contradicts what is stored: {error}. Use an id that is not taken.")
    elif isinstance(error, sqlite3.DataError | sqlite3.InterfaceError | sqlite3.ProgrammingError):
        translation = StoreError(f"A value cannot be stored: {error}.")
    elif isinstance(error, sqlite3.Error):
        name = _error_name(error)
        step = next((text for code, text in _NEXT_STEPS.items() if name.startswith(code)), "")
        if (
            name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))
            and path.suffix == ".db"
            and (path.parent / "checkpoints").is_dir()
        ):
            step = (
                "The file is damaged, and the run's checkpoints next to it hold what was learned. Move it "
                f"(mv {path} {path}.damaged) and go on with --resume {path.parent}: a new store is made."
            )
        translation = StoreUnavailableError(f"The store '{path}' failed: {error}. {step}".rstrip())
    elif isinstance(error, OverflowError | UnicodeEncodeError):
        translation = StoreError(f"A value cannot be stored: {error}. Numbers have 64 bits, and texts are Unicode.")
    elif isinstance(error, ValueError):  # a status, a number or a record that nobody wrote like that
        step = _NEXT_STEPS["SQLITE_CORRUPT"]
        translation = StoreError(f"What the store '{path}' holds cannot be read: {error}. {step}")
    else:
        return error
    translation.__cause__ = error
    return translation


class translated(contextlib.AbstractContextManager[None]):
    """Translates what is raised inside."""

    __slots__ = ("_path",)

    def __init__(self, path: Path):
        self._path = path

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and (translation := translate(error, self._path)) is not error:
            raise translation from error
