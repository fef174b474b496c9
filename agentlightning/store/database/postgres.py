"""The PostgreSQL database of a store that several machines share.

Keeps the promises of `sqlite`: results are delivered after their commit, and a failing operation does not disturb the
others of its group. Rows that decide about a status are locked when they are read, those of a group's rollouts before
anything else and always in the same order; claims and heartbeats skip what others have locked. So hardly anybody waits
for somebody who waits for him. What changes one rollout goes to one writer, and heartbeats to a thread that does
nothing else. News travels by NOTIFY. A transaction that lost against another one (a deadlock, the same id at the same
moment) is run again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import secrets
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import msgspec
import psycopg
from psycopg import errors, sql
from sqlalchemy.sql import ClauseElement

from agentlightning.errors import StoreUnavailableError
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
from agentlightning.store.database.link import (
    RECONNECT_SECONDS,
    Connection,
    Heartbeat,
    Others,
    Outage,
    ThreadLink,
    connect,
    translate,
)
from agentlightning.store.database.migrate import prepare_postgres
from agentlightning.store.database.notify import Notifier
from agentlightning.store.database.transaction import (
    DIALECTS,
    Changes,
    Parameters,
    Row,
    Statement,
    Transaction,
    TransactionOperation,
)
from agentlightning.types.ids import random_hex

logger = logging.getLogger(__name__)
T = TypeVar("T")

CHANNEL = "agl_store"
HEARTBEAT_CHANNEL = "agl_store_heard"
IDS_PER_NOTIFICATION = 100
RUNS_PER_NOTIFICATION = 10
"""A notification holds 8,000 bytes."""
News = tuple[str, list[tuple[str | None, int]], list[str]]
"""A notification: who sent it, how many rollouts of which runs became claimable, and which rollouts finished."""
SWITCH_SECONDS = 0.0005
"""A thread whose statement is answered holds locks: others that compute must not keep it from going on for long."""
COUNTER_SHARDS = 64
TRIES = 6
MAX_BATCH = 64
"""Operations per commit: others wait for what a batch has locked. The server groups the commits of several writers."""
MAX_BEATS = 1000
MAX_READS = 16
_LOCK = """
WITH locked AS MATERIALIZED (SELECT rollout_id FROM rollouts WHERE rollout_id = ANY(%s) ORDER BY rollout_id FOR UPDATE)
SELECT 1 FROM attempts WHERE rollout_id = ANY(ARRAY(SELECT rollout_id FROM locked)) ORDER BY attempt_id FOR UPDATE
"""
_LOST_RACE = (errors.DeadlockDetected, errors.SerializationFailure, errors.UniqueViolation)

Cursor = psycopg.Cursor[Row]


class _Broken(psycopg.OperationalError):
    """The connection broke. All may be run again: where it broke in the commit, and that was done, nothing changes."""


class PostgresTransaction:
    """The `Transaction` of a PostgreSQL connection's cursor. `wrote` tells whether it may have changed anything."""

    __slots__ = ("_cursor", "changes", "now", "wrote")

    def __init__(self, cursor: Cursor):
        self._cursor = cursor
        self.changes = Changes()
        self.now = time.time()
        self.wrote = False

    def row(self, statement: Statement, parameters: Parameters) -> Row | None:
        return self._run(statement.text("postgresql"), parameters).fetchone()

    def rows(self, statement: Statement, parameters: Parameters) -> list[Row]:
        return self._run(statement.text("postgresql"), parameters).fetchall()

    def run(self, statement: Statement, parameters: Parameters) -> int:
        self.wrote = True
        return self._run(statement.text("postgresql"), parameters).rowcount

    def many(self, statement: Statement, parameters: Sequence[Parameters]) -> int:
        self.wrote = True
        if not parameters:
            return 0
        self._cursor.executemany(_trusted(statement.text("postgresql")), parameters)
        return self._cursor.rowcount

    def each(self, statement: Statement, parameters: Sequence[Parameters]) -> list[int]:
        self.wrote = True
        if len(parameters) < 2:
            return [self.run(statement, one) for one in parameters]
        self._cursor.executemany(_trusted(statement.text("postgresql")), parameters, returning=True)
        changed = [self._cursor.rowcount]
        while self._cursor.nextset():
            changed.append(self._cursor.rowcount)
        return changed

    def select(self, element: ClauseElement) -> list[Row]:
        return self._execute(element).fetchall()

    def change(self, element: ClauseElement) -> int:
        self.wrote = True
        return self._execute(element).rowcount

    def _execute(self, element: ClauseElement) -> Cursor:
        compiled = element.compile(dialect=DIALECTS["postgresql"], compile_kwargs={"render_postcompile": True})
        return self._cursor.execute(str(compiled).encode(), compiled.params or {})

    def _run(self, text: str, parameters: Parameters) -> Cursor:
        return self._cursor.execute(_trusted(text), parameters)


@functools.lru_cache(maxsize=1024)
def _trusted(text: str) -> bytes:
    """SQL that SQLAlchemy made, with its values apart, as psycopg takes it without a look."""
    return text.encode()


class PostgresDatabase:
    """A pool of connections to a PostgreSQL server, each with a thread of its own."""

    def __init__(
        self,
        dsn: str,
        notifier: Notifier,
        tick: Watch,
        tick_seconds: float,
        writers: int = 4,
        *,
        outage_seconds: float,
    ):
        """`outage_seconds`: how long operations wait for a server that is away, before they fail."""
        self._dsn = dsn
        self._notifier = notifier
        self._tick = tick
        self._tick_seconds = tick_seconds
        self._name = random_hex(8)
        self._beats = JobQueue()
        self._writes = [JobQueue() for _ in range(writers)]
        self._turns = itertools.cycle(self._writes)
        self._reads = JobQueue()
        self._others = Others(self._name)
        self._complaints = Complaints()
        self._closed = threading.Event()
        self._outage = Outage(outage_seconds, self._closed)
        with connect(dsn) as connection:
            prepare_postgres(connection, dsn)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        loops = [(self._listen, "listener"), (self._beat_loop, "heartbeats")]
        loops += [(functools.partial(self._write_loop, number), f"writer-{number}") for number in range(writers)]
        loops += [(self._read_loop, f"reader-{number}") for number in range(writers)]
        self._threads = [threading.Thread(target=loop, name=f"agl-store-{name}", daemon=True) for loop, name in loops]
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
        """See `SqliteDatabase.write`. Those of `Turn.ALIVE` have methods `extend` and `record`."""
        if self._closed.is_set():
            raise closed_error()
        if turn is JobTurn.ALIVE:
            queue = self._beats
        elif (key := min(rollout_ids, default=lane)) is not None:
            queue = self._writes[hash(key) % len(self._writes)]
        else:
            queue = next(self._turns)
        return submit(queue, operation, undo, rollout_ids, turn)

    def read(self, operation: TransactionOperation[T]) -> asyncio.Future[T]:
        """See `SqliteDatabase.read`."""
        if self._closed.is_set():
            raise closed_error()
        return submit(self._reads, operation)

    async def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        for queue in self._queues:
            queue.end()
        await asyncio.to_thread(self._join)

    @property
    def _queues(self) -> list[JobQueue]:
        return [self._beats, *self._writes, self._reads]

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()
        for queue in self._queues:
            queue.refuse()

    # ---- writing ---------------------------------------------------------------------------------------------------

    def _write_loop(self, number: int) -> None:
        writer, queue = ThreadLink(self._dsn), self._writes[number]
        shard = str(secrets.randbelow(COUNTER_SHARDS))
        # One of the writers also runs the watchdog.
        next_tick = time.monotonic() if number == 0 else float("inf")
        open_ = True
        while open_:
            batch, open_ = queue.take(min(next_tick - time.monotonic(), 3600.0), MAX_BATCH)
            if batch:
                self._commit(writer, batch, shard)
                deliver(batch)
                queue.done()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + self._tick_seconds
                self._run_tick(writer, shard)
        writer.close()

    def _beat_loop(self) -> None:
        """Heartbeats of many workers at once, and how far this store is with all that came to it."""
        writer, next_news = ThreadLink(self._dsn), time.monotonic()
        shard = str(secrets.randbelow(COUNTER_SHARDS))
        open_ = True
        while open_:
            batch, open_ = self._beats.take(next_news - time.monotonic(), MAX_BEATS)
            if batch:
                halves = [Tick(functools.partial(half, batch)) for half in (_extend, _record)]
                for half in halves:
                    self._commit(writer, [half], shard)
                if any(half.error is not None for half in halves):  # perhaps of one of them only
                    self._commit(writer, batch, shard)
                deliver(batch)
                self._beats.done()
            if time.monotonic() >= next_news or not open_:
                self._beats.loops.ask()
                next_news = time.monotonic() + self._tick_seconds
                self._send_heartbeat(writer, last=not open_)
        writer.close()

    def _send_heartbeat(self, writer: ThreadLink, last: bool) -> None:
        heartbeat: Heartbeat = (self._name, None if last else time.time() - self._lag())
        try:
            writer.connection().execute(
                "SELECT pg_notify(%s, %s)", (HEARTBEAT_CHANNEL, msgspec.json.encode(heartbeat).decode())
            )
        except (psycopg.Error, StoreUnavailableError) as error:
            logger.debug("The other stores do not hear how far this one is: %s", error)
            writer.drop()

    def _lag(self) -> float:
        return lag_of(self._beats, *self._writes)

    def _run_tick(self, writer: ThreadLink, shard: str) -> None:
        tick = Tick(lambda tx: self._tick(tx, lag=max(self._lag(), self._others.lag())))
        self._commit(writer, [tick], shard)
        if tick.error is not None:
            self._complaints.about(tick.error)

    def _commit(self, writer: ThreadLink, batch: Sequence[Job], shard: str) -> None:
        """Run a batch in one transaction, again and again while it loses against others or the server is away."""
        failure: Exception = closed_error()
        attempt = 0
        while attempt < TRIES:
            try:
                changes = self._transact(writer.connection(), batch, shard, savepoints=attempt > 0)
            except (StoreUnavailableError, _Broken) as error:
                writer.drop()
                failure = error
                # What breaks each connection that it gets is not for ever worth another one.
                attempt += isinstance(error, _Broken)
                if not self._outage.wait():
                    break
            except _LOST_RACE as error:
                attempt += 1
                failure = error
                time.sleep(secrets.randbelow(10 * attempt) / 1000)
            except Exception as error:  # belongs to those who wait for the batch, and must not end the thread
                writer.drop()
                failure = error
                break
            else:
                self._outage.over()
                self._tell_waiters(changes)
                return
        for job in batch:
            job.error = translate(failure)

    def _transact(self, connection: Connection, batch: Sequence[Job], shard: str, savepoints: bool) -> Changes:
        changes = Changes()
        try:
            with connection.transaction():
                cursor = connection.cursor()
                # Two batches that lock the same rollouts one by one, each in its own order, would wait for each other.
                touched = sorted({rollout_id for job in batch for rollout_id in job.rollout_ids})
                if touched:
                    cursor.execute(_LOCK, (touched,))
                for job in batch:
                    _run_job(cursor, job, changes, savepoints)
                # Always in the same order, so that writers do not deadlock.
                write_counters(PostgresTransaction(cursor), shard, dict(sorted(changes.counts.items())))
                self._notify(connection, changes)
        except psycopg.OperationalError as error:
            if connection.broken:
                raise _Broken(str(error)) from error
            raise
        return changes

    def _notify(self, connection: Connection, changes: Changes) -> None:
        """Tell the other servers, with the commit."""
        queued = [(run_id, count) for run_id, count in changes.queued.items() if count > 0]
        news: list[News] = [(self._name, part, []) for part in _parts(queued, RUNS_PER_NOTIFICATION)]
        news += [(self._name, [], part) for part in _parts(changes.finished, IDS_PER_NOTIFICATION)]
        for item in news:
            connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, msgspec.json.encode(item).decode()))

    def _tell_waiters(self, changes: Changes) -> None:
        for run_id, count in changes.queued.items():
            self._notifier.queued(count, run_id)
        if changes.finished:
            self._notifier.finished(changes.finished)

    # ---- reading and listening -------------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        reader = ThreadLink(self._dsn, read_only=True)
        open_ = True
        while open_:
            batch, open_ = self._reads.take(3600.0, MAX_READS)
            if batch and not self._read(reader, batch):
                for job in batch:  # one of them failed
                    self._read(reader, [job])
            deliver(batch)
            self._reads.done()
        reader.close()

    def _read(self, reader: ThreadLink, batch: Sequence[Job]) -> bool:
        """Read in one transaction, again while the server is away. False if it failed; then the jobs have its error."""
        broken = 0
        while True:
            connection = None
            try:
                connection = reader.connection()
                with connection.transaction():
                    cursor = connection.cursor()
                    for job in batch:
                        job.error = None
                        job.result = job.operation(PostgresTransaction(cursor))
            except Exception as error:  # the caller's: it must reach the caller and not end the thread
                for job in batch:
                    job.error = translate(error)
                if connection is not None and not connection.broken:
                    return False
                broken += connection is not None
                reader.drop()
                if broken == TRIES or not self._outage.wait():
                    return False
            else:
                self._outage.over()
                return True

    def _listen(self) -> None:
        link = ThreadLink(self._dsn)
        while not self._closed.is_set():
            try:
                connection = link.connection()
                for channel in (CHANNEL, HEARTBEAT_CHANNEL):
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                # What was committed while nobody listened is found by looking again.
                self._notifier.everybody()
                while not self._closed.is_set():
                    for notification in connection.notifies(timeout=0.2):
                        if notification.channel == HEARTBEAT_CHANNEL:
                            self._others.hear(notification.payload)
                        else:
                            self._hear(notification.payload)
            except (psycopg.Error, StoreUnavailableError):
                logger.warning("The store lost its connection to PostgreSQL; connecting again.")
                link.drop()
                self._closed.wait(RECONNECT_SECONDS)
        link.close()

    def _hear(self, payload: str) -> None:
        sender, queued, finished = msgspec.json.decode(payload, type=News)
        if sender == self._name:
            return
        for run_id, count in queued:
            self._notifier.queued(count, run_id)
        if finished:
            self._notifier.finished(finished)


def _parts(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def _extend(jobs: Sequence[Job], tx: Transaction) -> None:
    """The first half of heartbeats, which waits for nobody."""
    operations = [job.operation for job in jobs]
    cast(Any, operations[0]).extend(tx, operations)


def _record(jobs: Sequence[Job], tx: Transaction) -> None:
    """The second half of heartbeats."""
    operations = [job.operation for job in jobs]
    for job, result in zip(jobs, cast(Any, operations[0]).record(tx, operations), strict=True):
        job.result, job.error = result, None


def _run_job(cursor: Cursor, job: Job, changes: Changes, savepoint: bool) -> None:
    """Run one operation. Raises when the whole transaction has to be run again."""
    connection = cursor.connection
    tx = PostgresTransaction(cursor)
    job.error = None
    try:
        if savepoint:
            with connection.transaction():
                job.result = job.operation(tx)
        else:
            job.result = job.operation(tx)
    except _LOST_RACE:
        raise
    except Exception as error:  # the caller's: it must reach the caller, whatever it is, and not end the thread
        if connection.broken:
            raise
        if not savepoint and (tx.wrote or isinstance(error, psycopg.Error)):
            # It left something behind: again, with a savepoint around each operation.
            raise errors.SerializationFailure(str(error)) from error
        job.error = translate(error)
    else:
        changes.merge(tx.changes)
