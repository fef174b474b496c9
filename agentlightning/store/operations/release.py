"""Giving back what a worker holds when it is known to be gone, without waiting for its leases to run out."""

from __future__ import annotations

from sqlalchemy import bindparam, select

from agentlightning.store.database.schema import attempts as attempts_table, workers as workers_table
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations import attempts
from agentlightning.types import AttemptStatus

_open = Statement(
    select(attempts_table.c.rollout_id, attempts_table.c.attempt_id)
    .where(attempts_table.c.worker_id == bindparam("worker"), attempts_table.c.deadline.is_not(None))
    .with_for_update(skip_locked=True)
)
_last_heartbeat = Statement(
    select(workers_table.c.last_heartbeat_time).where(workers_table.c.worker_id == bindparam("worker"))
)


def release(tx: Transaction, worker_id: str, error: str, quiet_seconds: float) -> int:
    """See `LightningStore.release_worker`."""
    last = tx.row(_last_heartbeat, {"worker": worker_id})
    if quiet_seconds and last is not None and (last[0] or 0.0) > tx.now - quiet_seconds:
        return 0
    held = tx.rows(_open, {"worker": worker_id})
    for rollout_id, attempt_id in held:
        attempt, rollout = attempts.load(tx, rollout_id, attempt_id)
        attempts.finish(tx, attempt, rollout, AttemptStatus.UNRESPONSIVE, None, error)
    return len(held)
