"""Workers: the runners as the store last heard of them.

A worker that holds several attempts is busy until the last of them has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from sqlalchemy import and_, bindparam, case, select, update

from agentlightning.store.base import UNSET, Unset
from agentlightning.store.database.schema import attempts, workers
from agentlightning.store.database.transaction import Ids, Statement, Transaction, among
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
_found_nothing = Statement(update(workers).where(_free), ["last_dequeue_time"])
_holds = Statement(update(workers).where(_free), ["current_rollout_id", "current_attempt_id"])
_idle = Statement(
    update(workers).where(_free), ["status", "last_idle_time", "current_rollout_id", "current_attempt_id"]
)
_of_these = among(workers.c.worker_id, "workers")
_select_known = Statement(select(workers.c.worker_id).where(_of_these))
_select_many = Statement(select(*WORKER_COLUMNS).where(_of_these))
_beat = Statement(
    update(workers).where(
        workers.c.worker_id.in_(select(workers.c.worker_id).where(_of_these).with_for_update(skip_locked=True))
    ),
    ["status", "last_heartbeat_time"],
)
_beat_stats = Statement(update(workers).where(_free), ["heartbeat_stats"])
_open_attempt = Statement(
    select(attempts.c.rollout_id, attempts.c.attempt_id)
    .where(attempts.c.worker_id == bindparam("worker"), attempts.c.deadline.is_not(None))
    .limit(1)
)
_now_plus_lease = bindparam("now") + attempts.c.lease
_extended = {
    "last_heartbeat_time": bindparam("now"),
    "deadline": case((_now_plus_lease < attempts.c.timeout_at, _now_plus_lease), else_=attempts.c.timeout_at),
}
_open = attempts.c.deadline.is_not(None)
_held_by_these = and_(among(attempts.c.worker_id, "workers"), _open)
_select_busy = Statement(select(attempts.c.worker_id).where(_held_by_these).distinct())
# Attempts that somebody else is changing are left out: whoever does so extends them, too, or ends them.
_select_open = Statement(
    select(attempts.c.attempt_id, attempts.c.worker_id)
    .where(among(attempts.c.attempt_id, "attempts"), _open)
    .with_for_update(skip_locked=True)
)
_extend_some = Statement(update(attempts).where(among(attempts.c.attempt_id, "attempts")).values(_extended))
_extend_all = Statement(
    update(attempts)
    .where(
        attempts.c.attempt_id.in_(select(attempts.c.attempt_id).where(_held_by_these).with_for_update(skip_locked=True))
    )
    .values(_extended)
)


def to_worker(row: Any) -> Worker:
    values = dict(zip(WORKER_FIELDS, row, strict=True))
    values["status"] = WorkerStatus(values["status"])
    if (stats := values["heartbeat_stats"]) is not None:
        values["heartbeat_stats"] = decode(stats, "workers.heartbeat_stats", values["worker_id"], type=dict[str, Any])
    return Worker.model_construct(**values)


def read(tx: Transaction, worker_id: str) -> Worker | None:
    row = tx.row(_select, {"worker": worker_id})
    return None if row is None else to_worker(row)


def _insert_new(tx: Transaction, worker_id: str) -> None:
    checked_id(worker_id, "A worker_id")
    if tx.run(_insert, {"worker_id": worker_id, "status": WorkerStatus.UNKNOWN.value}):
        tx.changes.counts["workers"] += 1


def _update(tx: Transaction, statement: Statement, worker_id: str, values: dict[str, Any]) -> None:
    """Workers are known after their first sign, so try the update first."""
    values["worker"] = worker_id
    # One that somebody else is changing is left as it is: an insert would wait for him.
    if not tx.run(statement, values) and tx.row(_select, {"worker": worker_id}) is None:
        _insert_new(tx, worker_id)
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


def found_nothing(tx: Transaction, worker_id: str) -> None:
    """The worker asked for work and there was none."""
    _update(tx, _found_nothing, worker_id, {"last_dequeue_time": tx.now})


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


class Heartbeat:
    """A worker is alive, and with it the attempts that it holds: those of `attempt_ids`, or all it has claimed.

    An operation. Those of many workers may be done together, in a handful of statements: first `extend`, and when that
    is committed `record`, which may wait for somebody who makes the same worker known.
    """

    __slots__ = ("attempt_ids", "stats", "worker_id")

    def __init__(
        self, worker_id: str, stats: dict[str, Any] | Unset = UNSET, attempt_ids: Sequence[str] | None = None
    ) -> None:
        self.worker_id = checked_id(worker_id, "A worker_id")
        self.stats = stats if isinstance(stats, Unset) else encode_task(stats, "heartbeat_stats")
        self.attempt_ids = None if attempt_ids is None else frozenset(attempt_ids)

    def __call__(self, tx: Transaction, /) -> Worker:
        self.extend(tx, [self])
        return self.record(tx, [self])[0]

    @staticmethod
    def record(tx: Transaction, beats: Sequence[Heartbeat]) -> list[Worker]:
        """The workers as they are after these heartbeats."""
        last = {beat.worker_id: beat for beat in beats}
        ids = Ids(last)
        known = {row[0] for row in tx.rows(_select_known, {"workers": ids})}
        for worker_id in sorted(last.keys() - known):
            _insert_new(tx, worker_id)
        busy = {row[0] for row in tx.rows(_select_busy, {"workers": ids})}
        for status, some in ((WorkerStatus.BUSY, busy), (WorkerStatus.IDLE, last.keys() - busy)):
            if some:
                tx.run(_beat, {"workers": Ids(sorted(some)), "status": status.value, "last_heartbeat_time": tx.now})
        stats = [{"worker": beat.worker_id, "heartbeat_stats": beat.stats} for beat in beats if beat.stats is not UNSET]
        tx.many(_beat_stats, stats)
        found = {row[0]: to_worker(row) for row in tx.rows(_select_many, {"workers": ids})}
        return [found[beat.worker_id] for beat in beats]

    @staticmethod
    def extend(tx: Transaction, beats: Sequence[Heartbeat]) -> None:
        """Give their attempts a new lease."""
        named: defaultdict[str, set[str]] = defaultdict(set)
        for beat in beats:
            for attempt_id in beat.attempt_ids or ():
                named[attempt_id].add(beat.worker_id)
        if named:
            open_ = tx.rows(_select_open, {"attempts": Ids(named)})
            extended = Ids(attempt_id for attempt_id, worker_id in open_ if worker_id in named[attempt_id])
            tx.run(_extend_some, {"attempts": extended, "now": tx.now})
        if all_ := Ids(beat.worker_id for beat in beats if beat.attempt_ids is None):
            tx.run(_extend_all, {"workers": all_, "now": tx.now})
