"""Finished rollouts out of one store and into another: as records, and records as JSON lines.

A record is what the tables hold of one rollout, its attempts, spans, segments and calls. A line is a record with JSON
columns as JSON and token arrays as base64, so that nothing is lost and `jq` can read it. Importing a rollout that is
there already changes nothing, and one that cannot be read back is refused (`intake`).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import LargeBinary, Table, select

from agentlightning.errors import ConflictError, StoreError
from agentlightning.keys import redacted
from agentlightning.store.database.schema import attempts, calls, rollouts, segments, spans
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations.calls import fetch_segments
from agentlightning.store.operations.spans import SPAN_COLUMNS, whole
from agentlightning.store.transfer.intake import OWN, check_columns, check_record
from agentlightning.types.status import FINISHED_ROLLOUT

BATCH = 100
Record = dict[str, list[dict[str, Any]]]
"""Rows as columns by name, by table; `rollout` has one."""

_JSON_COLUMNS = {"input", "config", "metadata", "attributes", "rest", "info", "versions"}
TABLES: dict[str, Table] = {
    "rollout": rollouts,
    "attempts": attempts,
    "spans": spans,
    "segments": segments,
    "calls": calls,
}
ADDED_LATER = {"run_id", "step", "group_id", "reward", "kept"}
"""Columns that exports of an older version lack; they are empty then."""
BY_ATTEMPT = {"segments"}
"""Tables whose rows name their attempt only."""


def columns(table: Table) -> list[str]:
    return [column.name for column in table.c if column.name not in OWN]


_BINARY = {column.name for table in TABLES.values() for column in table.c if isinstance(column.type, LargeBinary)}
_KEYS: dict[str, list[str]] = {
    "rollout": ["rollout_id"],
    "attempts": ["attempt_id"],
    "spans": ["rollout_id", "attempt_id", "span_id"],
    "segments": ["attempt_id", "segment_id"],
    "calls": ["rollout_id", "attempt_id", "call_id"],
}


def _insert(name: str, table: Table) -> Statement:
    keys = _KEYS[name]
    return Statement(lambda insert: insert(table).on_conflict_do_nothing(index_elements=keys), columns(table))


_inserts = {name: _insert(name, table) for name, table in TABLES.items()}


def export_page(tx: Transaction, after: int, limit: int = BATCH) -> tuple[list[Record], int]:
    """The finished rollouts that follow position `after`, and the position of the last one."""
    finished = rollouts.c.status.in_([status.value for status in FINISHED_ROLLOUT])
    found = tx.select(
        select(rollouts.c.seq, rollouts.c.rollout_id)
        .where(finished, rollouts.c.seq > after)
        .order_by(rollouts.c.seq)
        .limit(limit)
    )
    return [_export_one(tx, rollout_id) for _, rollout_id in found], found[-1][0] if found else after


def _export_one(tx: Transaction, rollout_id: str) -> Record:
    record: Record = {name: _rows_of(tx, table, rollout_id) for name, table in TABLES.items() if name not in BY_ATTEMPT}
    found = fetch_segments(tx, [row["attempt_id"] for row in record["attempts"]])
    record["segments"] = [{"attempt_id": name, **row._asdict()} for name, rows in found.items() for row in rows]
    return {name: [_shared(row) for row in record[name]] for name in TABLES}


def _rows_of(tx: Transaction, table: Table, rollout_id: str) -> list[dict[str, Any]]:
    names = columns(table)
    wanted = SPAN_COLUMNS if table is spans else [table.c[name] for name in names]
    found = tx.select(select(*wanted).where(table.c.rollout_id == rollout_id).order_by(table.c.seq))
    return [dict(zip(names, row, strict=True)) for row in (whole(tx, found) if table is spans else found)]


def _shared(row: dict[str, Any]) -> dict[str, Any]:
    """A row without attempts' keys: an older version may have stored one, and others read what is exported."""
    return {name: redacted(value) if isinstance(value, str) else value for name, value in row.items()}


def to_line(record: Record) -> bytes:
    parts = {name: [_encode(dict(row)) for row in rows] for name, rows in record.items()}
    return msgspec.json.encode({**parts, "rollout": parts["rollout"][0]})


def _encode(row: dict[str, Any]) -> dict[str, Any]:
    for name, value in row.items():
        if value is None:
            continue
        if name in _JSON_COLUMNS:
            row[name] = msgspec.Raw(value.encode())
        elif name in _BINARY:
            row[name] = base64.b64encode(value).decode()
    return row


def from_line(line: bytes) -> Record:
    try:
        parts = msgspec.json.decode(line, type=dict[str, Any])
        return {
            name: [_decode(row, table) for row in ([parts[name]] if name == "rollout" else parts[name])]
            for name, table in TABLES.items()
        }
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        shown = line[:100].decode(errors="replace").strip()
        raise StoreError(
            f"This line is not an exported rollout, as `agl store export` writes them ({why}): {shown} …"
        ) from error


def import_records(tx: Transaction, records: Sequence[Record]) -> int:
    """Store exported rollouts; returns how many were new."""
    return sum(_import_one(tx, record) for record in records)


def _import_one(tx: Transaction, rows: Record) -> bool:
    rows = {name: [_shared(row) for row in rows[name]] for name in TABLES}
    for name, table in TABLES.items():
        for row in rows[name]:
            check_columns(row, table)
    check_record(rows)
    (rollout,) = rows["rollout"]
    if not tx.run(_inserts["rollout"], rollout):
        return False
    tx.changes.moved("rollouts", None, rollout["status"])
    for attempt in rows["attempts"]:
        if not tx.run(_inserts["attempts"], attempt):
            raise ConflictError(
                f"Attempt '{attempt['attempt_id']}' of rollout '{rollout['rollout_id']}' exists already, in another "
                "rollout. Import into a store of its own."
            )
        tx.changes.moved("attempts", None, attempt["status"])
    tx.changes.counts["spans"] += tx.many(_inserts["spans"], rows["spans"])
    tx.many(_inserts["segments"], rows["segments"])
    tx.changes.counts["calls"] += tx.many(_inserts["calls"], rows["calls"])
    return True


def _decode(row: dict[str, Any], table: Table) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in columns(table):
        value = row.get(name) if name in ADDED_LATER else row[name]
        if name in _JSON_COLUMNS and (value is not None or name == "input"):
            value = msgspec.json.encode(value).decode()
        elif name in _BINARY and value is not None:
            value = base64.b64decode(value, validate=True)
        values[name] = value
    return values
