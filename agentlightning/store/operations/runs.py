"""Runs and their events: beginning one, saying where it stands, and appending what it measured and said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, select, update

from agentlightning.errors import NotFoundError
from agentlightning.keys import redacted
from agentlightning.store.base import Unset
from agentlightning.store.database.schema import run_events, runs
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations.codec import checked_id, decode, encode_seen, readable
from agentlightning.types import Run, RunEvent, RunStatus

RUN_FIELDS = tuple(Run.model_fields)
RUN_COLUMNS = [runs.c[name] for name in RUN_FIELDS]
EVENT_FIELDS = tuple(RunEvent.model_fields)
EVENT_COLUMNS = [run_events.c[name] for name in EVENT_FIELDS]

_insert = Statement(lambda insert: insert(runs).on_conflict_do_nothing(index_elements=["run_id"]), RUN_FIELDS)
_by_id = runs.c.run_id == bindparam("run")
_select = Statement(select(*RUN_COLUMNS).where(_by_id))
_select_locked = Statement(select(*RUN_COLUMNS).where(_by_id).with_for_update())
_update = Statement(update(runs).where(_by_id), [n for n in RUN_FIELDS if n not in ("run_id", "start_time")])
_of_run: ColumnElement[bool] = run_events.c.run_id == bindparam("run")
_drop_later = Statement(delete(run_events).where(_of_run, run_events.c.step >= bindparam("first_step")))
_insert_event = Statement(
    lambda insert: insert(run_events).on_conflict_do_nothing(index_elements=["run_id", "event_id"]), EVENT_FIELDS
)


def to_run(row: Sequence[Any]) -> Run:
    values = dict(zip(RUN_FIELDS, row, strict=True))
    values["error"] = values["error"] and redacted(values["error"])
    for name in ("settings", "state"):
        values[name] = decode(values[name], f"runs.{name}", values["run_id"], type=dict[str, Any])
    values["status"] = RunStatus(values["status"])
    return Run.model_construct(**values)


def to_event(row: Sequence[Any]) -> RunEvent:
    values = dict(zip(EVENT_FIELDS, row, strict=True))
    values["data"] = decode(values["data"], "run_events.data", values["event_id"], type=dict[str, Any])
    return RunEvent.model_construct(**values)


def prepare(run: Run) -> dict[str, Any]:
    """Encode a run before the transaction. Raises `StoreError` for what is not JSON."""
    return {
        **run.__dict__,
        "run_id": checked_id(run.run_id, "A run_id"),
        "status": run.status.value,
        "settings": encode_seen(run.settings),
        "state": encode_seen(run.state),
        "error": None if run.error is None else readable(run.error),
    }


def begin(tx: Transaction, new: dict[str, Any], first_step: int) -> Run:
    """Insert a run, or go on with the one of this id before step `first_step`, whose later events are dropped."""
    values = {**new, "start_time": new["start_time"] or tx.now, "end_time": None, "error": None}
    if not tx.run(_insert, values):
        tx.run(_update, {**values, "run": values["run_id"]})
        tx.run(_drop_later, {"run": values["run_id"], "first_step": first_step})
    return require(tx, values["run_id"])


def change(
    tx: Transaction, run_id: str, status: RunStatus | Unset, state: Mapping[str, Any] | Unset, error: str | Unset | None
) -> Run:
    """Write what is given; entries of `state` replace those of the same name."""
    run = require(tx, run_id)
    changes: dict[str, Any] = {}
    if not isinstance(state, Unset):
        changes["state"] = {**run.state, **state}
    if not isinstance(error, Unset):
        changes["error"] = error
    if not isinstance(status, Unset):
        ended = None if status is RunStatus.RUNNING else run.end_time if status == run.status else tx.now
        changes |= {"status": status, "end_time": ended}
    changed = run.model_copy(update=changes)
    tx.run(_update, {**prepare(changed), "run": run_id})
    return changed


def read(tx: Transaction, run_id: str) -> Run | None:
    row = tx.row(_select, {"run": run_id})
    return None if row is None else to_run(row)


def require(tx: Transaction, run_id: str) -> Run:
    """The run, locked until the transaction ends."""
    row = tx.row(_select_locked, {"run": run_id})
    if row is None:
        raise NotFoundError(f"There is no run '{run_id}' in the store.")
    return to_run(row)


def prepare_event(event: RunEvent) -> dict[str, Any]:
    return {**event.__dict__, "data": encode_seen(event.data)}


def add_events(tx: Transaction, values: Sequence[dict[str, Any]]) -> None:
    """Append events of runs that are known; those that are there already are skipped."""
    for run_id in dict.fromkeys(value["run_id"] for value in values):
        require(tx, run_id)
    tx.many(_insert_event, values)
