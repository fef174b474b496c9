"""Connections to PostgreSQL, one a thread, and its errors as ours."""

from __future__ import annotations

import threading
import time

import psycopg
from psycopg import errors

from agentlightning.errors import AgentLightningError, ConflictError, StoreError, StoreUnavailableError
from agentlightning.store.database.transaction import Row

Connection = psycopg.Connection[Row]

RECONNECT_SECONDS = 1.0
"""Between two tries to reach a server that is away."""


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
    """How long the server has been away, for all threads: what they are asked meanwhile waits for it, up to a limit."""

    def __init__(self, seconds: float, closed: threading.Event):
        self._seconds = seconds
        self._closed = closed
        self._began: float | None = None

    def over(self) -> None:
        """Something has been done again."""
        self._began = None

    def wait(self) -> bool:
        """Wait before the next try. False if it has lasted too long, or the store is closed."""
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
    elif isinstance(error, ValueError):  # a status, a number or a record that nobody wrote like that
        translation = StoreError(f"What the store's database in PostgreSQL holds cannot be read: {error}. {_RESTORE}")
    else:
        return error
    translation.__cause__ = error
    return translation
