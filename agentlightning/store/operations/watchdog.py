"""The watchdog: ends attempts that are overdue and calls claimers when a retry's wait is over.

Runs as an operation of the writer, now and then and on its own. It names the stuck rollout, its phase and the last
thing that was heard of it.
"""

from __future__ import annotations

import logging

from sqlalchemy import bindparam, case, select, update

from agentlightning.store.database.schema import attempts as attempts_table
from agentlightning.store.database.schema import spans
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations import attempts, rollouts
from agentlightning.types import AttemptStatus

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
MAX_PER_TICK = 200

_overdue = Statement(
    select(attempts_table.c.rollout_id, attempts_table.c.attempt_id)
    .where(attempts_table.c.deadline <= bindparam("now"))
    .order_by(attempts_table.c.deadline)
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_last_span = Statement(
    select(spans.c.name)
    .where(spans.c.rollout_id == bindparam("rollout"), spans.c.attempt_id == bindparam("attempt"))
    .order_by(spans.c.sequence_id.desc())
    .limit(1)
)
_renewed = bindparam("now") + attempts_table.c.lease
_renew = Statement(
    update(attempts_table)
    .where(attempts_table.c.deadline.is_not(None), attempts_table.c.timeout_at > bindparam("now"))
    .values(deadline=case((_renewed < attempts_table.c.timeout_at, _renewed), else_=attempts_table.c.timeout_at))
)


class Watchdog:
    """An operation with a memory: when it last looked."""

    def __init__(self) -> None:
        self._last: float | None = None

    def __call__(self, tx: Transaction) -> None:
        if self._last is None:
            # While the store was down nobody could send a heartbeat: living runners get a full lease from now on.
            tx.run(_renew, {"now": tx.now})
            self._last = 0.0
        tx.changes.queued += rollouts.count_due(tx, self._last)
        self._last = tx.now
        for rollout_id, attempt_id in tx.rows(_overdue, {"now": tx.now, "limit": MAX_PER_TICK}):
            self._end(tx, rollout_id, attempt_id)

    def _end(self, tx: Transaction, rollout_id: str, attempt_id: str) -> None:
        attempt, rollout = attempts.load(tx, rollout_id, attempt_id)
        row = tx.row(_last_span, {"rollout": rollout_id, "attempt": attempt_id})
        last = "no span yet" if row is None else f"last span '{row[0]}'"
        if attempt.timeout_at <= tx.now:
            status, cause = AttemptStatus.TIMEOUT, "it took longer than its timeout"
        else:
            status, cause = AttemptStatus.UNRESPONSIVE, f"no heartbeat for {attempt.lease:g} s"
        error = f"The attempt was {attempt.status} on worker {attempt.worker_id or '(unnamed)'}; {cause}; {last}."
        logger.warning("Rollout %s, attempt %s is given up as %s: %s", rollout_id, attempt_id, status, error)
        attempts.finish(tx, attempt, rollout, status, None, error)
