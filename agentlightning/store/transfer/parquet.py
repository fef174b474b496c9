"""Exported rollouts as a folder of Parquet files, one per table, for notebooks and query engines.

Columns are those of the tables: JSON as text, token ids as int32 and log-probs as float32 bytes, little endian. Rows
stand in the order of their rollouts, so that a folder is written and read without ever holding all of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import BigInteger, Double, Integer, LargeBinary

from agentlightning.errors import StoreError, missing_extra
from agentlightning.files import atomic_directory
from agentlightning.store.transfer.records import ADDED_LATER, BY_ATTEMPT, TABLES, Record, columns

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError:
    raise missing_extra("parquet", "pyarrow") from None

ROWS_PER_GROUP = 10_000
Row = dict[str, Any]


def file_names() -> dict[str, str]:
    """The file of each table."""
    return {name: f"{'rollouts' if name == 'rollout' else name}.parquet" for name in TABLES}


def _schema(name: str) -> pa.Schema:
    kinds = {BigInteger: pa.int64(), Integer: pa.int64(), Double: pa.float64(), LargeBinary: pa.binary()}
    table = TABLES[name]
    return pa.schema(
        [
            pa.field(
                column, kinds.get(type(table.c[column].type), pa.string()), nullable=bool(table.c[column].nullable)
            )
            for column in columns(table)
        ]
    )


async def write_folder(records: AsyncIterator[Record], folder: Path) -> int:
    """Write all records to a folder, which appears (or takes the place of an older one) when it is whole.

    Returns how many there were.
    """
    count = 0
    with atomic_directory(folder) as work, ExitStack() as stack:
        writers = {
            name: stack.enter_context(_Writer(work / file, _schema(name))) for name, file in file_names().items()
        }
        async for record in records:
            count += 1
            for name, rows in record.items():
                writers[name].add(rows)
    return count


class _Writer:
    """Collects rows into row groups."""

    def __init__(self, path: Path, schema: pa.Schema):
        self._schema = schema
        self._rows: list[Row] = []
        self._file = pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self._flush()
        self._file.close()

    def add(self, rows: list[Row]) -> None:
        self._rows += rows
        if len(self._rows) >= ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(pa.Table.from_pylist(self._rows, self._schema))
            self._rows = []


def read_folder(folder: Path) -> Iterator[Record]:
    """The records of a folder that `write_folder` made."""
    missing = [file for file in file_names().values() if not (folder / file).is_file()]
    if missing:
        raise StoreError(f"'{folder}' is not an exported store: {', '.join(missing)} is missing.")
    streams = {name: _Stream(folder / file, name) for name, file in file_names().items()}
    while (rollout := streams["rollout"].next()) is not None:
        record: Record = {"rollout": [rollout]}
        for name, stream in streams.items():
            if name != "rollout":
                record[name] = list(stream.take_while(_belongs(name, record)))
        yield record
    for name, stream in streams.items():
        if stream.next() is not None:
            raise StoreError(
                f"{file_names()[name]} in '{folder}' has rows of rollouts that are not there, or its rows were sorted "
                "in another order than they were exported in."
            )


def _belongs(name: str, record: Record) -> Callable[[Row], bool]:
    if name in BY_ATTEMPT:
        attempt_ids = {row["attempt_id"] for row in record["attempts"]}
        return lambda row: row["attempt_id"] in attempt_ids
    rollout_id = record["rollout"][0]["rollout_id"]
    return lambda row: row["rollout_id"] == rollout_id


class _Stream:
    """The rows of a file, one after the other, with a look at the next one."""

    def __init__(self, path: Path, name: str):
        self._rows = _read(path, columns(TABLES[name]))
        self._next: Row | None = None

    def next(self) -> Row | None:
        row, self._next = self._next, None
        return row if row is not None else next(self._rows, None)

    def take_while(self, belongs: Callable[[Row], bool]) -> Iterator[Row]:
        while (row := self.next()) is not None:
            if not belongs(row):
                self._next = row
                return
            yield row


def _read(path: Path, names: list[str]) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            lacking = set(names) - set(file.schema_arrow.names)
            if lacking - ADDED_LATER:
                raise StoreError(f"'{path}' lacks columns: {', '.join(sorted(lacking - ADDED_LATER))}.")
            for batch in file.iter_batches(columns=[name for name in names if name not in lacking]):
                yield from (dict.fromkeys(lacking) | row for row in batch.to_pylist())
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise StoreError(f"'{path}' is not a Parquet file, or it is damaged: {error}") from error
