"""Finished rollouts out of one store and into another: as records, and records as JSON lines.

A record is what the tables hold of one rollout, its attempts, spans, segments and calls. A line is a record with JSON
columns as JSON and token arrays as base64, so that nothing is lost and `jq` can read it. Importing a rollout that is
there already changes nothing.

Records are checked before they are stored: what is let in can be read back, and is over and done. A record that only
looks like one (a damaged file, another program's) would otherwise break every page it is on, or stand in the way of the
queue and the watchdog.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from sqlalchemy import BigInteger, Double, Integer, LargeBinary, Table, select

from agentlightning.errors import ConflictError, StoreError
from agentlightning.keys import redacted
from agentlightning.store.database.schema import attempts, calls, rollouts, segments, spans
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations.calls import CallRow, CallTable, assemble, fetch_segments
from agentlightning.store.operations.codec import ATTEMPT_FIELDS, ROLLOUT_FIELDS, to_attempt, to_rollout
from agentlightning.store.operations.segments import TOKEN_BYTES, SegmentRow
from agentlightning.store.operations.spans import SPAN_COLUMNS, SPAN_FIELDS, to_span, whole
from agentlightning.types import FINISHED_ATTEMPT, Attempt, Rollout
from agentlightning.types.arrays import fits_kept
from agentlightning.types.reward import checked_reward, reward_error
from agentlightning.types.status import FINISHED_ROLLOUT

BATCH = 100
Record = dict[str, list[dict[str, Any]]]
"""By table, rows as columns by name; `rollout` has one row."""

_JSON_COLUMNS = {"input", "config", "metadata", "attributes", "rest", "info", "versions"}
TABLES: dict[str, Table] = {
    "rollout": rollouts,
    "attempts": attempts,
    "spans": spans,
    "segments": segments,
    "calls": calls,
}
ADDED_LATER = {"run_id", "step", "group_id", "reward", "kept"}
"""Columns that exports of an older version lack, and that are empty then."""
_OWN = {"seq", "source_attempt", "source_segment", "source_span", "texts"}
"""Columns for how a store has stored a row; records lack them."""
BY_ATTEMPT = {"segments"}
"""Tables whose rows name their attempt, not their rollout."""


def columns(table: Table) -> list[str]:
    return [column.name for column in table.c if column.name not in _OWN]


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
            _check_columns(row, table)
    _check_record(rows)
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


_Rows = Sequence[dict[str, Any]]


def _check_columns(row: dict[str, Any], table: Table) -> None:
    """Raises `StoreError` unless every column has a value of its type."""
    for column in table.c:
        if column.name in _OWN:
            continue
        value = row[column.name]
        if value is None:
            fits = bool(column.nullable)
        elif isinstance(column.type, BigInteger | Integer):
            fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
        elif isinstance(column.type, Double):
            fits = isinstance(value, int | float) and not isinstance(value, bool)
        else:
            fits = isinstance(value, bytes if isinstance(column.type, LargeBinary) else str)
        if not fits:
            raise StoreError(f"{table.name}.{column.name} is {value!r:.100}.")


def _check_record(record: dict[str, list[dict[str, Any]]]) -> None:
    """Read a record with checked columns as the store will read it. Raises `StoreError` where that fails."""
    (rollout,) = record["rollout"]
    rollout_id = rollout["rollout_id"]
    if rollout["status"] not in FINISHED_ROLLOUT:
        raise StoreError(f"Rollout '{rollout_id}' is {rollout['status']}; only finished ones are imported.")
    _all_read(f"Rollout '{rollout_id}'", [rollout], _read_rollout)
    _all_read(f"An attempt of rollout '{rollout_id}'", record["attempts"], _read_attempt)
    attempts = {row["attempt_id"] for row in record["attempts"]}
    for name in ("attempts", "spans", "segments", "calls"):
        for row in record[name]:
            if row.get("rollout_id", rollout_id) != rollout_id or row["attempt_id"] not in attempts:
                raise StoreError(f"The {name} of rollout '{rollout_id}' hold rows of another rollout or attempt.")
    if rollout["latest_attempt_id"] not in {None, *attempts} or len(attempts) != len(record["attempts"]):
        raise StoreError(f"The attempts of rollout '{rollout_id}' are not whole.")
    _all_read(f"A span of rollout '{rollout_id}'", record["spans"], _read_span)
    if rollout["reward"] is not None:
        _all_read(f"Rollout '{rollout_id}'", [rollout], lambda row: checked_reward(row["reward"], is_json=True))
    _check_calls(rollout_id, record["segments"], record["calls"])


def _values(row: dict[str, Any], fields: Sequence[str]) -> list[Any]:
    return [row[name] for name in fields]


def _all_read(what: str, rows: _Rows, read: Callable[[dict[str, Any]], Any]) -> None:
    for row in rows:
        try:
            read(row)
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise StoreError(f"{what} cannot be read: {error}") from error


def _read_rollout(row: dict[str, Any]) -> None:
    Rollout.model_validate(to_rollout(_values(row, ROLLOUT_FIELDS)).__dict__)
    if row["available_at"] is not None:
        raise ValueError("it is finished and queued")


def _read_attempt(row: dict[str, Any]) -> None:
    attempt = Attempt.model_validate(to_attempt(_values(row, ATTEMPT_FIELDS)).__dict__)
    if attempt.status not in FINISHED_ATTEMPT or row["deadline"] is not None:
        raise ValueError(f"it is {attempt.status} and has a deadline, although its rollout is finished")


def _read_span(row: dict[str, Any]) -> None:
    span = to_span(_values(row, SPAN_FIELDS))
    if (wrong := reward_error(span.name, span.attributes)) is not None:
        raise ValueError(wrong)


def _check_calls(rollout_id: str, segments: _Rows, calls: _Rows) -> None:
    what = f"A call of rollout '{rollout_id}'"
    known: dict[tuple[str, str], int] = {}
    by_attempt: dict[str, list[SegmentRow]] = {row["attempt_id"]: [] for row in calls}
    for row in segments:
        segment = SegmentRow(*_values(row, SegmentRow._fields))
        whole = {len(data) for data in (segment.ids, segment.logprobs, segment.plain_logprobs) if data is not None}
        before = 0 if segment.parent_id is None else known.get((row["attempt_id"], segment.parent_id), -1)
        # Parents come first, so that no path goes round in a circle.
        odd = len(whole) != 1 or len(segment.ids) % TOKEN_BYTES or not 0 <= segment.parent_keep <= before
        if odd or (segment.kept is not None and not fits_kept(segment.kept, segment.length)):
            raise StoreError(f"{what} cannot be read: its segment '{segment.segment_id}' is damaged.")
        known[row["attempt_id"], segment.segment_id] = segment.length
        by_attempt.setdefault(row["attempt_id"], []).append(segment)
    table = CallTable([CallRow(*_values(row, CallRow._fields)) for row in calls], by_attempt)
    try:
        assemble(table, [rollout_id])
    except (ValueError, TypeError, StoreError, msgspec.MsgspecError, ValidationError) as error:
        raise StoreError(f"{what} cannot be read: {error}") from error
