"""Attempts: starting one, keeping it alive, ending it, and what its rollout and its worker become.

All functions take a transaction. Every change of status checks the transition tables and is a compare-and-set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import bindparam, select, update

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.keys import redacted
from agentlightning.store.base import UNSET, Unset
from agentlightning.store.database.schema import attempts, rollouts
from agentlightning.store.database.transaction import Ids, Row, Statement, Transaction, among
from agentlightning.store.operations import lifecycle, rewards, workers
from agentlightning.store.operations.codec import (
    ATTEMPT_FIELDS,
    checked_id,
    decode_config,
    encode_metadata,
    new_id,
    to_attempt,
)
from agentlightning.types import Attempt, AttemptStatus, Outcome, RolloutStatus
from agentlightning.types.status import (
    ATTEMPT_TRANSITIONS,
    FINISHED_ATTEMPT,
    FINISHED_ROLLOUT,
    ROLLOUT_BY_HAND,
    ROLLOUT_TRANSITIONS,
)

T = TypeVar("T")


class RolloutState(NamedTuple):
    """The columns of a rollout that decide about its status."""

    rollout_id: str
    status: str
    config: str | None
    latest_attempt_id: str | None
    attempts: int
    failures: int
    infra_failures: int
    run_id: str | None


class AttemptState(NamedTuple):
    """The columns of an attempt that decide about its status."""

    attempt_id: str
    rollout_id: str
    status: str
    worker_id: str | None
    last_heartbeat_time: float | None
    lease: float
    timeout_at: float
    next_span: int


STATE_COLUMNS = [rollouts.c[name] for name in RolloutState._fields]
_attempt_columns = [attempts.c[name] for name in AttemptState._fields]
ATTEMPT_COLUMNS = [attempts.c[name] for name in ATTEMPT_FIELDS]

_select_state = Statement(
    select(*_attempt_columns, *STATE_COLUMNS)
    .join_from(attempts, rollouts, attempts.c.rollout_id == rollouts.c.rollout_id)
    .where(attempts.c.attempt_id == bindparam("attempt"))
    .with_for_update()
)
_select_states = Statement(
    select(*_attempt_columns, *STATE_COLUMNS)
    .join_from(attempts, rollouts, attempts.c.rollout_id == rollouts.c.rollout_id)
    .where(among(attempts.c.attempt_id, "attempts"))
    .order_by(rollouts.c.rollout_id, attempts.c.attempt_id)
    .with_for_update()
)
_select_rollout_state = Statement(
    select(*STATE_COLUMNS).where(rollouts.c.rollout_id == bindparam("rollout")).with_for_update()
)
_select_attempts = Statement(select(*ATTEMPT_COLUMNS).where(among(attempts.c.attempt_id, "attempts")))
_select_attempt = Statement(select(*ATTEMPT_COLUMNS).where(attempts.c.attempt_id == bindparam("attempt")))
_insert_attempt = Statement(
    lambda insert: insert(attempts),
    [c.name for c in attempts.c if c.name not in ("seq", "end_time", "outcome", "error", "metadata", "rewards")],
)
_update_rollout_attempt = Statement(
    update(rollouts).where(rollouts.c.rollout_id == bindparam("rollout"), rollouts.c.status == bindparam("old")),
    ["status", "available_at", "attempts", "latest_attempt_id", "reward"],
)
_update_rollout_running = Statement(
    update(rollouts).where(rollouts.c.rollout_id == bindparam("rollout"), rollouts.c.status == bindparam("old")),
    ["status", "available_at"],
)
_update_rollout_verdict = Statement(
    update(rollouts).where(rollouts.c.rollout_id == bindparam("rollout"), rollouts.c.status == bindparam("old")),
    ["status", "end_time", "available_at", "failures", "infra_failures"],
)
_touch = Statement(
    update(attempts).where(attempts.c.attempt_id == bindparam("attempt"), attempts.c.status == bindparam("old")),
    ["status", "last_heartbeat_time", "deadline", "next_span", "end_time", "outcome", "error"],
)
_keep_alive = Statement(
    update(attempts).where(attempts.c.attempt_id == bindparam("attempt"), attempts.c.status == bindparam("old")),
    ["status", "last_heartbeat_time", "deadline", "next_span"],
)
_finish = Statement(
    update(attempts).where(attempts.c.attempt_id == bindparam("attempt"), attempts.c.status == bindparam("old")),
    ["status", "end_time", "deadline", "outcome", "error"],
)
_update_details = Statement(
    update(attempts).where(attempts.c.attempt_id == bindparam("attempt")),
    ["worker_id", "metadata", "outcome", "error"],
)


def load(tx: Transaction, rollout_id: str, attempt_id: str) -> tuple[AttemptState, RolloutState]:
    """The attempt ("latest": the last one) with its rollout, locked until the transaction ends."""
    if attempt_id == "latest":
        rollout = load_rollout(tx, rollout_id)
        if rollout.latest_attempt_id is None:
            raise NotFoundError(f"Rollout '{rollout_id}' has no attempt yet; claim it first.")
        attempt_id = rollout.latest_attempt_id
    return _states(tx.row(_select_state, {"attempt": attempt_id}), rollout_id, attempt_id)


def load_many(tx: Transaction, pairs: Iterable[tuple[str, str]]) -> dict[str, tuple[AttemptState, RolloutState]]:
    """As `load`, of many rollouts and attempts at once, by the attempts' ids."""
    wanted = list(pairs)
    rows = {row[0]: row for row in tx.rows(_select_states, {"attempts": Ids(attempt_id for _, attempt_id in wanted)})}
    return {attempt_id: _states(rows.get(attempt_id), rollout_id, attempt_id) for rollout_id, attempt_id in wanted}


def _states(row: Row | None, rollout_id: str, attempt_id: str) -> tuple[AttemptState, RolloutState]:
    if row is None or row[1] != rollout_id:
        raise NotFoundError(f"There is no attempt '{attempt_id}' of a rollout '{rollout_id}' in the store.")
    split = len(_attempt_columns)
    return AttemptState._make(row[:split]), RolloutState._make(row[split:])


def load_rollout(tx: Transaction, rollout_id: str) -> RolloutState:
    row = tx.row(_select_rollout_state, {"rollout": rollout_id})
    if row is None:
        raise NotFoundError(f"There is no rollout '{rollout_id}' in the store.")
    return RolloutState._make(row)


def read(tx: Transaction, attempt_id: str) -> Attempt | None:
    row = tx.row(_select_attempt, {"attempt": attempt_id})
    return None if row is None else to_attempt(row)


def read_many(tx: Transaction, attempt_ids: Sequence[str]) -> list[Attempt]:
    """The attempts that exist among these, in the order asked for."""
    if len(attempt_ids) == 1:
        one = read(tx, attempt_ids[0])
        return [] if one is None else [one]
    found: dict[str, Attempt] = {}
    for row in tx.rows(_select_attempts, {"attempts": Ids(attempt_ids)}):
        attempt = to_attempt(row)
        found[attempt.attempt_id] = attempt
    return [found[attempt_id] for attempt_id in attempt_ids if attempt_id in found]


def check_rollout(rollout: RolloutState, new: RolloutStatus, *, by_hand: bool = False) -> None:
    table = ROLLOUT_BY_HAND if by_hand else ROLLOUT_TRANSITIONS
    if new not in table[RolloutStatus(rollout.status)]:
        raise ConflictError(f"Rollout '{rollout.rollout_id}' is {rollout.status}; it cannot become {new}.")


def compare_and_set(changed: int, noun: str, id: str) -> None:
    """The row was read in the same transaction, so a lost race means a bug or a broken lock, never a normal outcome."""
    if changed != 1:
        raise ConflictError(f"The status of {noun} '{id}' changed under this operation; read it again.")


def start(tx: Transaction, claims: Sequence[tuple[RolloutState, str | None]], worker_id: str | None) -> list[Attempt]:
    """A new attempt of each of these queued rollouts, which become preparing."""
    begun = [_new_attempt(tx, rollout, worker_id, attempt_id) for rollout, attempt_id in claims]
    tx.each(_insert_attempt, begun)
    written = [
        {
            "rollout": rollout.rollout_id,
            "old": rollout.status,
            "status": RolloutStatus.PREPARING.value,
            "available_at": None,
            "attempts": rollout.attempts + 1,
            "latest_attempt_id": values["attempt_id"],
            "reward": None,
        }
        for (rollout, _), values in zip(claims, begun, strict=True)
    ]
    for (rollout, _), changed in zip(claims, tx.each(_update_rollout_attempt, written), strict=True):
        compare_and_set(changed, "rollout", rollout.rollout_id)
        tx.changes.moved("rollouts", rollout.status, RolloutStatus.PREPARING)
        tx.changes.moved("attempts", None, AttemptStatus.PREPARING)
    if worker_id is not None and begun:
        workers.claimed(tx, worker_id, begun[-1]["rollout_id"], begun[-1]["attempt_id"])
    return [to_attempt([values.get(name) for name in ATTEMPT_FIELDS]) for values in begun]


def _new_attempt(
    tx: Transaction, rollout: RolloutState, worker_id: str | None, attempt_id: str | None
) -> dict[str, Any]:
    """The columns of a rollout's next attempt."""
    check_rollout(rollout, RolloutStatus.PREPARING)
    lease, timeout = lifecycle.limits(decode_config(rollout.config))
    return {
        "attempt_id": checked_id(attempt_id, "An attempt_id") if attempt_id else new_id("at"),
        "rollout_id": rollout.rollout_id,
        "sequence_id": rollout.attempts + 1,
        "start_time": tx.now,
        "status": AttemptStatus.PREPARING.value,
        "worker_id": worker_id,
        "last_heartbeat_time": tx.now,
        "next_span": 1,
        "lease": lease,
        "timeout_at": tx.now + timeout,
        "deadline": lifecycle.deadline(tx.now, lease, tx.now + timeout),
    }


class Sign(NamedTuple):
    """A sign of life, with `running` one that shows work."""

    attempt: AttemptState
    rollout: RolloutState
    running: bool
    heartbeat: float | None = None
    next_span: int | None = None


def keep_alive(tx: Transaction, signs: Sequence[Sign]) -> list[str]:
    """Write signs of life, at most one of each attempt; returns the attempts' statuses after them.

    Changes no status but preparing → running, and unresponsive → running while it is still the latest attempt and its
    rollout waits for the next one.
    """
    statuses = [_status_after(tx, sign) for sign in signs]
    revived: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for sign, status in zip(signs, statuses, strict=True):
        values = _after(tx, sign, status)
        if status != sign.attempt.status and sign.attempt.status in FINISHED_ATTEMPT:
            revived.append({**values, "end_time": None, "outcome": None, "error": None})
        else:
            others.append(values)
    for statement, written in ((_touch, revived), (_keep_alive, others)):
        for values, changed in zip(written, tx.each(statement, written), strict=True):
            compare_and_set(changed, "attempt", values["attempt"])
    begun = [sign for sign, status in zip(signs, statuses, strict=True) if status != sign.attempt.status]
    for sign in begun:
        tx.changes.moved("attempts", sign.attempt.status, AttemptStatus.RUNNING)
    _rollouts_run(tx, begun)
    return statuses


def _status_after(tx: Transaction, sign: Sign) -> str:
    attempt, rollout = sign.attempt, sign.rollout
    revived = (
        attempt.status == AttemptStatus.UNRESPONSIVE
        and rollout.latest_attempt_id == attempt.attempt_id
        and rollout.status == RolloutStatus.REQUEUING
        and tx.now < attempt.timeout_at
    )
    begins = sign.running and attempt.status == AttemptStatus.PREPARING
    return AttemptStatus.RUNNING.value if revived or begins else attempt.status


def _after(tx: Transaction, sign: Sign, status: str) -> dict[str, Any]:
    """The attempt's columns after a sign of life."""
    attempt = sign.attempt
    open_ = status not in FINISHED_ATTEMPT
    return {
        "attempt": attempt.attempt_id,
        "old": attempt.status,
        "status": status,
        "last_heartbeat_time": (sign.heartbeat or tx.now) if open_ else attempt.last_heartbeat_time,
        "deadline": lifecycle.deadline(tx.now, attempt.lease, attempt.timeout_at) if open_ else None,
        "next_span": attempt.next_span if sign.next_span is None else sign.next_span,
    }


def _rollouts_run(tx: Transaction, signs: Sequence[Sign]) -> None:
    """The rollouts of these attempts that are running now follow."""
    begun: dict[str, RolloutState] = {}
    for attempt, rollout, *_ in signs:
        if rollout.latest_attempt_id == attempt.attempt_id and rollout.status != RolloutStatus.RUNNING:
            check_rollout(rollout, RolloutStatus.RUNNING)
            begun[rollout.rollout_id] = rollout
    running = {"status": RolloutStatus.RUNNING.value, "available_at": None}
    written = [{"rollout": one.rollout_id, "old": one.status, **running} for one in begun.values()]
    for rollout, changed in zip(begun.values(), tx.each(_update_rollout_running, written), strict=True):
        compare_and_set(changed, "rollout", rollout.rollout_id)
        tx.changes.moved("rollouts", rollout.status, RolloutStatus.RUNNING)


def finish(
    tx: Transaction,
    attempt: AttemptState,
    rollout: RolloutState,
    status: AttemptStatus,
    outcome: Outcome | None = None,
    error: str | None = None,
) -> None:
    """End an attempt; its rollout follows if it is the latest one."""
    if status not in ATTEMPT_TRANSITIONS[AttemptStatus(attempt.status)]:
        raise ConflictError(f"Attempt '{attempt.attempt_id}' is {attempt.status}; it cannot become {status}.")
    if rollout.latest_attempt_id != attempt.attempt_id:
        raise ConflictError(
            f"Attempt '{attempt.attempt_id}' was given up as {attempt.status}, and rollout '{rollout.rollout_id}' "
            f"is now at attempt '{rollout.latest_attempt_id}'; only the latest attempt counts. Drop this result."
        )
    close(tx, attempt, status, outcome, error)
    if rollout.status in FINISHED_ROLLOUT:
        return
    config = decode_config(rollout.config)
    verdict = lifecycle.after_attempt(status, outcome, config, rollout.failures, rollout.infra_failures)
    # A requeued rollout whose unresponsive attempt reports a failure after all just stays queued.
    if verdict.status not in ROLLOUT_TRANSITIONS[RolloutStatus(rollout.status)]:
        return
    settle(tx, rollout, verdict)


def close(
    tx: Transaction, attempt: AttemptState, status: AttemptStatus, outcome: Outcome | None, error: str | None
) -> None:
    """Write the end of an attempt and release its worker; the rollout is the caller's business."""
    changed = tx.run(
        _finish,
        {
            "attempt": attempt.attempt_id,
            "old": attempt.status,
            "status": status.value,
            "end_time": tx.now,
            "deadline": None,
            "outcome": (outcome or lifecycle.DEFAULT_OUTCOMES[status]).value,
            "error": error and redacted(error),
        },
    )
    compare_and_set(changed, "attempt", attempt.attempt_id)
    tx.changes.moved("attempts", attempt.status, status)
    rewards.note(tx, attempt.attempt_id, attempt.rollout_id, 0.0 if outcome is Outcome.TRUNCATED else None)
    if attempt.worker_id is not None:
        workers.released(tx, attempt.worker_id, responsive=status is not AttemptStatus.UNRESPONSIVE)


def settle(tx: Transaction, rollout: RolloutState, verdict: lifecycle.AttemptVerdict, *, by_hand: bool = False) -> None:
    """Write the verdict on a rollout."""
    check_rollout(rollout, verdict.status, by_hand=by_hand)
    requeued = verdict.status is RolloutStatus.REQUEUING
    changed = tx.run(
        _update_rollout_verdict,
        {
            "rollout": rollout.rollout_id,
            "old": rollout.status,
            "status": verdict.status.value,
            "end_time": None if requeued else tx.now,
            "available_at": tx.now + verdict.delay if requeued else None,
            "failures": verdict.failures,
            "infra_failures": verdict.infra_failures,
        },
    )
    compare_and_set(changed, "rollout", rollout.rollout_id)
    tx.changes.moved("rollouts", rollout.status, verdict.status)
    if not requeued:
        tx.changes.finished.append(rollout.rollout_id)
    elif verdict.delay == 0:
        tx.changes.queued[rollout.run_id] += 1


@dataclass(frozen=True, slots=True)
class AttemptChange:
    """What `LightningStore.update_attempt` was given."""

    status: AttemptStatus | Unset = UNSET
    worker_id: str | Unset = UNSET
    last_heartbeat_time: float | Unset = UNSET
    metadata: dict[str, Any] | Unset | None = UNSET
    outcome: Outcome | Unset = UNSET
    error: str | Unset | None = UNSET


def update_attempt(tx: Transaction, rollout_id: str, attempt_id: str, change: AttemptChange) -> Attempt:
    """See `LightningStore.update_attempt`."""
    attempt, rollout = load(tx, rollout_id, attempt_id)
    status = change.status
    if isinstance(status, Unset) or status not in FINISHED_ATTEMPT:
        _go_on(tx, attempt, rollout, change)
        _write_details(tx, attempt.attempt_id, change, outcome=change.outcome, error=change.error)
    else:
        if attempt.status != status:
            finish(tx, attempt, rollout, status, _given(change.outcome), _given(change.error))
        # The finish has written outcome and error, and a repeated one changes nothing.
        _write_details(tx, attempt.attempt_id, change, outcome=UNSET, error=UNSET)
    stored = read(tx, attempt.attempt_id)
    assert stored is not None
    return stored


def _given(value: T | Unset) -> T | None:
    return None if isinstance(value, Unset) else value


def _go_on(tx: Transaction, attempt: AttemptState, rollout: RolloutState, change: AttemptChange) -> None:
    """A heartbeat, or the news that work has begun."""
    running = change.status is AttemptStatus.RUNNING
    status = attempt.status
    beat = change.last_heartbeat_time
    if running or not isinstance(beat, Unset):
        (status,) = keep_alive(tx, [Sign(attempt, rollout, running, None if isinstance(beat, Unset) else beat)])
    # A plain beat on an ended attempt is no error: its answer is how a runner learns that it was cancelled.
    if not isinstance(change.status, Unset) and status != change.status:
        raise ConflictError(f"Attempt '{attempt.attempt_id}' is {status}; it cannot become {change.status}.")


def _write_details(
    tx: Transaction, attempt_id: str, change: AttemptChange, *, outcome: Outcome | Unset, error: str | Unset | None
) -> None:
    """The columns that no rule depends on."""
    worker_id, metadata = change.worker_id, change.metadata
    if all(isinstance(value, Unset) for value in (worker_id, metadata, outcome, error)):
        return
    stored = read(tx, attempt_id)
    assert stored is not None
    new_outcome = stored.outcome if isinstance(outcome, Unset) else outcome
    tx.run(
        _update_details,
        {
            "attempt": attempt_id,
            "worker_id": stored.worker_id if isinstance(worker_id, Unset) else worker_id,
            "metadata": encode_metadata(stored.metadata if isinstance(metadata, Unset) else metadata),
            "outcome": None if new_outcome is None else new_outcome.value,
            "error": stored.error if isinstance(error, Unset) else error and redacted(error),
        },
    )
    if isinstance(worker_id, str) and worker_id != stored.worker_id and stored.status not in FINISHED_ATTEMPT:
        _hand_over(tx, stored, worker_id)


def _hand_over(tx: Transaction, attempt: Attempt, new: str) -> None:
    """The workers' records follow an open attempt that was given to another one."""
    if attempt.worker_id is not None:
        workers.released(tx, attempt.worker_id, responsive=True)
    workers.claimed(tx, new, attempt.rollout_id, attempt.attempt_id)
