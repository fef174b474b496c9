"""What a writer said → its query; a database → what a writer is told of it; two queries → the reward."""

from __future__ import annotations

import re
import sqlite3
from functools import cache
from pathlib import Path

from .sandbox import run_query, same


def score(database: Path, query: str, wanted: str) -> float:
    """1.0 if both queries give the same rows; in the same order, if the wanted one has an order."""
    expected = run_query(database, wanted, seconds=30.0)
    if expected.error is not None:
        raise ValueError(f"The task's own query fails on {database}: {expected.error}")
    return float(same(run_query(database, query), expected, ordered="order by" in wanted.lower()))


def extract_query(text: str) -> str:
    """The query in the last ```sql block, or the whole text if there is none."""
    blocks = re.findall(r"```(?:sql)?\s*(.*?)```", text, flags=re.DOTALL)
    return (blocks[-1] if blocks else text).strip().removesuffix(";")


@cache
def describe(database: Path) -> str:
    """The tables and their columns, a line each."""
    if not database.is_file():
        raise FileNotFoundError(f"There is no database {database}.")
    connection = sqlite3.connect(f"{database.resolve().as_uri()}?mode=ro", uri=True)
    try:
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
        columns = {t: connection.execute("SELECT name FROM pragma_table_info(?)", (t,)).fetchall() for (t,) in tables}
    finally:
        connection.close()
    return "\n".join(f"{table}({', '.join(name for (name,) in found)})" for table, found in columns.items())
