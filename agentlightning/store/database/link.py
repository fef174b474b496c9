"""Connections to PostgreSQL, one a thread, its errors as ours, and `Others`: how far the other stores on the same
database are.

A heartbeat may have come to another store and not be stored yet, so each store tells the others a time before which
everything that came to it is stored. What is read after such a message holds all that.
"""

from __future__ import annotations

import threading
import time

import msgspec
import psycopg
from psycopg import errors

from agentlightning.errors import AgentLightningError, ConflictError, StoreError, StoreUnavailableError
from agentlightning.store.database.transaction import Row

Connection = psycopg.Connection[Row]

RECONNECT_SECONDS = 1.0
"""The longest pause between two tries to reach a server that is away."""


class ThreadLink:
    """One thread's connection, made when it is needed and made again after it broke."""

    def __init__(self, dsn: str, *, read_only: bool = False):
        self._dsn = dsn
        self._read_only = read_only
        self._connection: Connection | None = None

    def connection(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._dsn)
            if self._read_only:
                self._connection.read_only = True
                self._connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        return self._connection

    def drop(self) -> None:
        """Forget the connection if it is broken."""
        if self._connection is not None and self._connection.broken:
            self._connection.close()
            self._connection = None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


class Outage:
    """How long the server has been away, for all threads. Operations wait for it meanwhile, up to a limit."""

    def __init__(self, seconds: float, closed: threading.Event):
        self._seconds = seconds
        self._closed = closed
        self._began: float | None = None

    def over(self) -> None:
        """The server is back: an operation succeeded."""
        self._began = None

    def wait(self) -> bool:
        """Wait before the next try. False if the outage has lasted too long, or the store is closed."""
        now = time.monotonic()
        began = self._began = now if self._began is None else self._began
        if now - began >= self._seconds:
            return False
        return not self._closed.wait(min(RECONNECT_SECONDS, 0.05 + (now - began) / 4))


def connect(dsn: str) -> Connection:
    try:
        return psycopg.connect(dsn, autocommit=True, connect_timeout=10)
    except psycopg.Error as error:
        form = " Give it as postgresql://USER@HOST/DATABASE." if 'missing "="' in str(error) else ""
        raise StoreUnavailableError(
            f"PostgreSQL cannot be reached: {str(error).strip()}. Check that it runs, and its address.{form}"
        ) from error


_DAMAGED = (errors.DataCorrupted, errors.IndexCorrupted, errors.UndefinedTable, errors.UndefinedColumn)
_RESTORE = "Stop what uses it, keep a copy (pg_dump), then restore the database from a backup or name an empty one."


def translate(error: Exception) -> Exception:
    """PostgreSQL's errors as `StoreError`s that say what to do next; all others as they are."""
    if isinstance(error, AgentLightningError):  # some are ValueErrors, too
        return error
    if isinstance(error, psycopg.IntegrityError):
        translation: Exception = ConflictError(
            f"This contradicts what is stored: {str(error).strip()}. Use an id that is not taken."
        )
    elif isinstance(error, psycopg.DataError):
        translation = StoreError(f"A value cannot be stored: {error}.")
    elif isinstance(error, _DAMAGED):
        translation = StoreError(f"The store's database in PostgreSQL is damaged: {str(error).strip()}. {_RESTORE}")
    elif isinstance(error, psycopg.Error):
        translation = StoreUnavailableError(f"PostgreSQL failed: {str(error).strip()}. Try again; nothing is lost.")
    elif isinstance(error, OverflowError | UnicodeEncodeError):
        translation = StoreError(f"A value cannot be stored: {error}. Numbers have 64 bits, and texts are Unicode.")
    elif isinstance(error, ValueError):  # a status, a number or a record in a form that no store writes
        translation = StoreError(f"What the store's database in PostgreSQL holds cannot be read: {error}. {_RESTORE}")
    else:
        return error
    translation.__cause__ = error
    return translation


Heartbeat = tuple[str, float | None]
"""The name of a store, and the time before which all that came to it is stored; None when it closes."""
_FORGET_SECONDS = 15.0
"""A store without a heartbeat for so long is taken to be gone."""


class Others:
    """How far the other stores on the same database are with storing what came to them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._heartbeats: dict[str, tuple[float, float]] = {}
        """By store: the time before which all that came to it is stored, and when we heard it, by our steady clock."""

    def hear(self, payload: str) -> None:
        name, beat = msgspec.json.decode(payload, type=Heartbeat)
        if name == self._name:
            return
        if beat is None:
            self._heartbeats.pop(name, None)
        else:
            self._heartbeats[name] = (beat, time.monotonic())

    def lag(self) -> float:
        """The age in seconds of the oldest thing that came to one of them and is not stored."""
        forgotten = time.monotonic() - _FORGET_SECONDS
        now = time.time()
        return max(
            (now - beat for beat, received in list(self._heartbeats.values()) if received > forgotten), default=0.0
        )
