"""Workers: the runners as the store last heard of them.

A worker that holds several attempts is busy until the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, bindparam, case, select, update

from agentlightning.store.base import Unset
from agentlightning.store.database.schema import attempts, workers
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations.codec import checked_id, decode, encode_task
from agentlightning.types import Worker, WorkerStatus

WORKER_FIELDS = tuple(Worker.model_fields)
WORKER_COLUMNS = [workers.c[name] for name in WORKER_FIELDS]

_insert = Statement(
    lambda insert: insert(workers).on_conflict_do_nothing(index_elements=["worker_id"]), ["worker_id", "status"]
)
_by_id = workers.c.worker_id == bindparam("worker")
_select = Statement(select(*WORKER_COLUMNS).where(_by_id))
_free = workers.c.worker_id.in_(select(workers.c.worker_id).where(_by_id).with_for_update(skip_locked=True))
"""The worker, unless somebody else is changing it: its next heartbeat makes up for what is left out then."""
_busy = Statement(
    update(workers).where(_free),
    ["status", "last_dequeue_time", "last_busy_time", "current_rollout_id", "current_attempt_id"],
)
_asked = Statement(update(workers).where(_free), ["last_dequeue_time"])
_holds = Statement(update(workers).where(_free), ["current_rollout_id", "current_attempt_id"])
_idle = Statement(
    update(workers).where(_free), ["status", "last_idle_time", "current_rollout_id", "current_attempt_id"]
)
_beat = Statement(update(workers).where(_free), ["status", "last_heartbeat_time"])
_beat_stats = Statement(update(workers).where(_free), ["status", "last_heartbeat_time", "heartbeat_stats"])
_open_attempt = Statement(
    select(attempts.c.rollout_id, attempts.c.attempt_id)
    .where(attempts.c.worker_id == bindparam("worker"), attempts.c.deadline.is_not(None))
    .limit(1)
)
_now_plus_lease = bindparam("now") + attempts.c.lease
_open_of_worker = and_(attempts.c.worker_id == bindparam("worker"), attempts.c.deadline.is_not(None))
_extended = {
    "last_heartbeat_time": bindparam("now"),
    "deadline": case((_now_plus_lease < attempts.c.timeout_at, _now_plus_lease), else_=attempts.c.timeout_at),
}


def _unless_locked(*which: ColumnElement[bool]) -> ColumnElement[bool]:
    """Attempts that nobody else is changing: whoever does so extends them, too, or ends them."""
    return attempts.c.attempt_id.in_(select(attempts.c.attempt_id).where(*which).with_for_update(skip_locked=True))


_extend = Statement(update(attempts).where(_unless_locked(_open_of_worker)).values(_extended))
_extend_one = Statement(
    update(attempts)
    .where(_unless_locked(attempts.c.attempt_id == bindparam("attempt"), _open_of_worker))
    .values(_extended)
)


def to_worker(row: Any) -> Worker:
    values = dict(zip(WORKER_FIELDS, row, strict=True))
    values["status"] = WorkerStatus(values["status"])
    stats = values["heartbeat_stats"]
    values["heartbeat_stats"] = None if stats is None else decode(stats)
    return Worker.model_construct(**values)


def read(tx: Transaction, worker_id: str) -> Worker | None:
    row = tx.row(_select, {"worker": worker_id})
    return None if row is None else to_worker(row)


def _ensure(tx: Transaction, worker_id: str) -> None:
    checked_id(worker_id, "A worker_id")
    if tx.run(_insert, {"worker_id": worker_id, "status": WorkerStatus.UNKNOWN.value}):
        tx.changes.counts["workers"] += 1


def _update(tx: Transaction, statement: Statement, worker_id: str, values: dict[str, Any]) -> None:
    """Workers are known after their first sign, so try the update first."""
    values["worker"] = worker_id
    if not tx.run(statement, values):
        _ensure(tx, worker_id)
        tx.run(statement, values)


def claimed(tx: Transaction, worker_id: str, rollout_id: str, attempt_id: str) -> None:
    """The worker took an attempt."""
    values = {
        "status": WorkerStatus.BUSY.value,
        "last_dequeue_time": tx.now,
        "last_busy_time": tx.now,
        "current_rollout_id": rollout_id,
        "current_attempt_id": attempt_id,
    }
    _update(tx, _busy, worker_id, values)


def asked(tx: Transaction, worker_id: str) -> None:
    """The worker asked for work and there was none."""
    _update(tx, _asked, worker_id, {"last_dequeue_time": tx.now})


def released(tx: Transaction, worker_id: str, *, responsive: bool) -> None:
    """One of the worker's attempts ended."""
    held = tx.row(_open_attempt, {"worker": worker_id})
    if held is not None:
        tx.run(_holds, {"worker": worker_id, "current_rollout_id": held[0], "current_attempt_id": held[1]})
        return
    status = WorkerStatus.IDLE if responsive else WorkerStatus.UNKNOWN
    values = {
        "worker": worker_id,
        "status": status.value,
        "last_idle_time": tx.now,
        "current_rollout_id": None,
        "current_attempt_id": None,
    }
    tx.run(_idle, values)


def heartbeat(
    tx: Transaction, worker_id: str, stats: dict[str, Any] | Unset, attempt_ids: Sequence[str] | None = None
) -> Worker:
    """The worker is alive, and with it the attempts it holds: those of `attempt_ids`, or all it has claimed."""
    if attempt_ids is None:
        tx.run(_extend, {"worker": worker_id, "now": tx.now})
    else:
        tx.many(_extend_one, [{"worker": worker_id, "attempt": one, "now": tx.now} for one in attempt_ids])
    held = tx.row(_open_attempt, {"worker": worker_id})
    status = WorkerStatus.IDLE if held is None else WorkerStatus.BUSY
    values: dict[str, Any] = {"status": status.value, "last_heartbeat_time": tx.now}
    if isinstance(stats, Unset):
        _update(tx, _beat, worker_id, values)
    else:
        _update(tx, _beat_stats, worker_id, {**values, "heartbeat_stats": encode_task(stats, "heartbeat_stats")})
    worker = read(tx, worker_id)
    assert worker is not None
    return worker
