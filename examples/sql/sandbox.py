"""Runs a model's SQL on a database that it can only read, for a limited time, and compares results.

A query is one SELECT: SQLite itself refuses everything else (an authorizer), opens the file read-only, and is
interrupted when the time is over. What a query costs in memory is limited too.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 1.0
ROWS = 1000
LARGEST_VALUE = 100_000
"""Bytes of the largest text or blob that a query may make."""
ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
OPCODES_BETWEEN_LOOKS = 1000


@dataclass(frozen=True)
class Result:
    """The rows of a query, or why there are none."""

    rows: list[tuple[Any, ...]]
    error: str | None = None

    def show(self, limit: int = 3) -> str:
        """What an agent is shown: the first rows."""
        if self.error is not None:
            return f"Error: {self.error}"
        lines = [", ".join(_show(value) for value in row) for row in self.rows[:limit]]
        more = len(self.rows) - limit
        return "\n".join([*lines, *([f"and {more} more"] if more > 0 else [])]) or "no rows"


def run_query(database: Path, sql: str, seconds: float = SECONDS) -> Result:
    """The result of one SELECT. What is wrong with it comes back as an error; only a missing database raises."""
    if not database.is_file():
        raise FileNotFoundError(f"There is no database {database}.")
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
    connection.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY)
    deadline = time.monotonic() + seconds
    connection.set_progress_handler(lambda: int(time.monotonic() > deadline), OPCODES_BETWEEN_LOOKS)
    try:
        rows = connection.execute(sql).fetchmany(ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:
        timed_out = time.monotonic() > deadline
        return Result([], f"more than {seconds:g} seconds" if timed_out else str(error))
    finally:
        connection.close()
    return Result(rows) if len(rows) <= ROWS else Result([], f"more than {ROWS} rows")


def same(found: Result, wanted: Result, *, ordered: bool) -> bool:
    """Whether two results hold the same rows, in the same order if it matters."""
    if found.error is not None or wanted.error is not None:
        return False
    mine, other = [[_comparable(row) for row in result.rows] for result in (found, wanted)]
    return mine == other if ordered else Counter(mine) == Counter(other)


def _comparable(row: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(round(value, 6) if isinstance(value, float) else value for value in row)


def _show(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
