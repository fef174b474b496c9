"""Records from elsewhere, looked at before they are stored: what is let in can be read back, and is over and done.

A record that only looks like one (a damaged file, another program's) would otherwise break every page it is on, or
stand in the way of the queue and the watchdog.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pydantic import ValidationError
from sqlalchemy import BigInteger, Double, Integer, LargeBinary, Table

from agentlightning.errors import StoreError
from agentlightning.store.operations.calls import CallRow, CallTable, assemble
from agentlightning.store.operations.codec import ATTEMPT_FIELDS, ROLLOUT_FIELDS, to_attempt, to_rollout
from agentlightning.store.operations.segments import TOKEN_BYTES, SegmentRow
from agentlightning.store.operations.spans import SPAN_FIELDS, to_span
from agentlightning.types import FINISHED_ATTEMPT, Attempt, Rollout
from agentlightning.types.kept import fits_kept
from agentlightning.types.reward import checked_reward, reward_error
from agentlightning.types.status import FINISHED_ROLLOUT

Rows = Sequence[dict[str, Any]]
OWN = {"seq", "source_attempt", "source_segment", "source_span", "texts"}
"""Columns in which a store keeps how it has stored a row; records lack them."""


def check_columns(row: dict[str, Any], table: Table) -> None:
    """Whether every column has a value of its type. Raises `StoreError`."""
    for column in table.c:
        if column.name in OWN:
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


def check_record(record: dict[str, list[dict[str, Any]]]) -> None:
    """Read a record whose columns have their types as the store will read it. Raises `StoreError`."""
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


def _all_read(what: str, rows: Rows, read: Callable[[dict[str, Any]], Any]) -> None:
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


def _check_calls(rollout_id: str, segments: Rows, calls: Rows) -> None:
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
