"""The watchdog: ends attempts that are overdue and calls claimers when a retry's wait is over. And `release`, which
gives back what a worker holds when it is known to be gone, without waiting for its leases to run out.

The watchdog runs as an operation of the writer, now and then and on its own. It names the stuck rollout, its phase and
the last thing that was heard of it. No attempt is given up because the store is behind: it is overdue only when all
that came before its deadline, heartbeats among it, is stored, and not while runners find a store again that stood
still.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import ColumnElement, bindparam, case, select, update

from agentlightning.store.database.schema import (
    attempts as attempts_table,
    rollouts as rollouts_table,
    spans,
    workers as workers_table,
)
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations import attempts, lifecycle, rollouts
from agentlightning.store.operations.codec import decode_config
from agentlightning.types import AttemptStatus
from agentlightning.types.rollout import TIMEOUT_SETTING

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5
MAX_PER_TICK = 200
JUMP_SECONDS = 5.0
"""The smallest step of the clock, or time in which the store did nothing, that is noticed."""
PATIENCE_SECONDS = 20.0
"""How long no attempt is given up after that: every runner that lives sends a heartbeat meanwhile."""
FAR = 1e15


def _overdue(*conditions: ColumnElement[bool]) -> Statement:
    return Statement(
        select(attempts_table.c.rollout_id, attempts_table.c.attempt_id)
        .where(attempts_table.c.deadline <= bindparam("heard"), *conditions)
        .order_by(attempts_table.c.deadline)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
    )


_ended = _overdue()
_timed_out = _overdue(attempts_table.c.timeout_at <= bindparam("heard"))
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

_shift_timeouts = Statement(
    update(attempts_table)
    .where(
        attempts_table.c.deadline.is_not(None),
        attempts_table.c.start_time > bindparam("since"),
        attempts_table.c.start_time <= bindparam("before"),
    )
    .values(
        timeout_at=attempts_table.c.timeout_at + bindparam("jump"),
        # It began by the new clock, then: another server on this machine that notices the same step leaves it alone.
        start_time=attempts_table.c.start_time + bindparam("jump"),
    )
)
_shift_queue = Statement(
    update(rollouts_table)
    .where(rollouts_table.c.available_at > bindparam("since"), rollouts_table.c.available_at <= bindparam("before"))
    .values(available_at=rollouts_table.c.available_at + bindparam("jump"))
)


class Watchdog:
    """An operation that remembers when it last looked, by the wall clock and by a steady one.

    It is meant to look every `every` seconds.
    """

    def __init__(self, steady: Callable[[], float] = time.monotonic, every: float = TICK_SECONDS) -> None:
        self._steady = steady
        self._every = every
        self._last: float | None = None
        self._last_steady = 0.0
        self._patient_until = 0.0
        self._reported: list[str] = []

    def __call__(self, tx: Transaction, /, lag: float = 0.0) -> None:
        """`lag`: all that came more than so many seconds ago is stored."""
        steady = self._steady()
        if self._last is None:
            # While the store was down nobody could send a heartbeat: living runners get a full lease from now on.
            tx.run(_renew, {"now": tx.now})
            self._last = 0.0
        elif abs(jump := (tx.now - self._last) - (steady - self._last_steady)) > JUMP_SECONDS:
            self._step(tx, jump, steady - self._last_steady)
        elif (stood := steady - self._last_steady - self._every) > JUMP_SECONDS:
            logger.warning("The store stood still for %.0f s; nobody is given up for %.0f s.", stood, PATIENCE_SECONDS)
            self._patient_until = steady + PATIENCE_SECONDS
        tx.changes.queued.update(rollouts.count_due(tx, min(self._last, tx.now)))
        self._last, self._last_steady = tx.now, steady
        overdue = _timed_out if steady < self._patient_until else _ended
        found = tx.rows(overdue, {"heard": tx.now - lag, "limit": MAX_PER_TICK})
        ended = [self._end(tx, rollout_id, attempt_id) for rollout_id, attempt_id in found]
        if ended and ended != self._reported:  # on a disk that is full nothing of it was kept, and it is tried again
            self._reported = ended
            more = f" So are {len(ended) - 1} more; their errors say why." if len(ended) > 1 else ""
            logger.warning("%s%s", ended[0], more)
            for words in ended[1:]:
                logger.info("%s", words)

    def _step(self, tx: Transaction, jump: float, passed: float) -> None:
        """The machine slept, or its clock was set: nobody ran out of time for that.

        `passed` are the seconds since the last look, in which something may have begun before the step as well.
        """
        logger.warning("The clock went %+.0f s at once; deadlines are moved by as much, and leases renewed.", jump)
        assert self._last is not None
        # What began after the step has deadlines by the new clock already.
        since, before = (0.0, self._last + passed) if jump > 0 else (tx.now, FAR)
        values = {"jump": jump, "since": since, "before": before}
        tx.run(_shift_timeouts, values)
        tx.run(_shift_queue, values)
        tx.run(_renew, {"now": tx.now})

    def _end(self, tx: Transaction, rollout_id: str, attempt_id: str) -> str:
        """End the attempt; the words for the log."""
        attempt, rollout = attempts.load(tx, rollout_id, attempt_id)
        row = tx.row(_last_span, {"rollout": rollout_id, "attempt": attempt_id})
        last = "no span yet" if row is None else f"last span '{row[0]}'"
        if attempt.timeout_at <= tx.now:
            _, seconds = lifecycle.limits(decode_config(rollout.config))
            status, cause = AttemptStatus.TIMEOUT, f"it took longer than {seconds:g} s"
        else:
            status, cause = AttemptStatus.UNRESPONSIVE, f"no heartbeat for {attempt.lease:g} s"
        error = f"The attempt was {attempt.status} on worker {attempt.worker_id or '(unnamed)'}; {cause}; {last}."
        if status is AttemptStatus.TIMEOUT:
            error = f"{error} {TIMEOUT_SETTING}"
        attempts.finish(tx, attempt, rollout, status, None, error)
        return f"Rollout {rollout_id}, attempt {attempt_id} is given up as {status}: {error}"


_held_by = Statement(
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
    held = tx.rows(_held_by, {"worker": worker_id})
    for rollout_id, attempt_id in held:
        attempt, rollout = attempts.load(tx, rollout_id, attempt_id)
        attempts.finish(tx, attempt, rollout, AttemptStatus.UNRESPONSIVE, None, error)
    return len(held)
