"""Rollouts: enqueueing, claiming, changing and reading them.

All functions take a transaction; see `attempts` for what happens when an attempt ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, bindparam, delete, func, select, update

from agentlightning.errors import ConflictError, NotFoundError
from agentlightning.store.base import UNSET, Unset
from agentlightning.store.database.schema import attempts as attempts_table, resources, rollouts, spans
from agentlightning.store.database.transaction import Ids, Row, Statement, Transaction, among
from agentlightning.store.operations import attempts, lifecycle, workers
from agentlightning.store.operations.attempts import STATE_COLUMNS, RolloutState
from agentlightning.store.operations.codec import (
    ROLLOUT_FIELDS,
    checked_id,
    encode_config,
    encode_metadata,
    encode_task,
    new_id,
    rollout_values,
    to_attempt,
    to_rollout,
)
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
    RolloutMode,
    RolloutStatus,
)
from agentlightning.types.rollout import group_in, step_in
from agentlightning.types.status import FINISHED_ATTEMPT, FINISHED_ROLLOUT

ROLLOUT_COLUMNS = [rollouts.c[name] for name in ROLLOUT_FIELDS]
_SPLIT = len(ROLLOUT_FIELDS)

_insert = Statement(
    lambda insert: insert(rollouts).on_conflict_do_nothing(index_elements=["rollout_id"]),
    [c.name for c in rollouts.c if c.name not in ("seq", "end_time", "latest_attempt_id", "reward")],
)
_by_id = rollouts.c.rollout_id == bindparam("rollout")
_select = Statement(select(*ROLLOUT_COLUMNS).where(_by_id))
SELECT_WITH_ATTEMPT = select(*ROLLOUT_COLUMNS, *attempts.ATTEMPT_COLUMNS).join_from(
    rollouts, attempts_table, rollouts.c.latest_attempt_id == attempts_table.c.attempt_id, isouter=True
)
"""Rollouts with their latest attempts, for `to_either`."""
_among = among(rollouts.c.rollout_id, "rollouts")
_select_status = Statement(select(rollouts.c.rollout_id, rollouts.c.status).where(_among))
_select_many = Statement(SELECT_WITH_ATTEMPT.where(_among))
_select_both = Statement(SELECT_WITH_ATTEMPT.where(_by_id))


def _queue(*scope: ColumnElement[bool]) -> Statement:
    return Statement(
        select(*ROLLOUT_COLUMNS, *STATE_COLUMNS)
        .where(rollouts.c.available_at <= bindparam("now"), *scope)
        .order_by(rollouts.c.available_at, rollouts.c.seq)
        .limit(bindparam("limit"))
        .with_for_update(skip_locked=True)
    )


_queue_of_all = _queue()
_queue_of_run = _queue(rollouts.c.run_id == bindparam("run"))
_queue_of_none = _queue(rollouts.c.run_id.is_(None))
_due = Statement(
    select(rollouts.c.run_id, func.count())
    .where(rollouts.c.available_at > bindparam("since"), rollouts.c.available_at <= bindparam("now"))
    .group_by(rollouts.c.run_id)
)
_latest_resources = Statement(select(resources.c.resources_id).order_by(resources.c.revision.desc()).limit(1))
_update_details = Statement(update(rollouts).where(_by_id), ["input", "mode", "resources_id", "config", "metadata"])
_update_place = Statement(update(rollouts).where(_by_id), ["step", "group_id"])
_delete_attempt = Statement(delete(attempts_table).where(attempts_table.c.attempt_id == bindparam("attempt")))
_count_spans = Statement(
    select(func.count()).where(spans.c.rollout_id == bindparam("rollout"), spans.c.attempt_id == bindparam("attempt"))
)
_unclaim = Statement(
    update(rollouts).where(_by_id, rollouts.c.latest_attempt_id == bindparam("attempt")),
    ["status", "available_at", "attempts", "latest_attempt_id"],
)
_previous = Statement(
    select(attempts_table.c.attempt_id)
    .where(attempts_table.c.rollout_id == bindparam("rollout"))
    .order_by(attempts_table.c.sequence_id.desc())
    .limit(1)
)


NewRollout = dict[str, Any]
"""The columns of a rollout that is about to be created."""


def prepare(request: EnqueueRolloutRequest) -> NewRollout:
    """Encode a request before the transaction, so that the writer only writes."""
    return {
        "rollout_id": checked_id(request.rollout_id, "A rollout_id") if request.rollout_id else new_id("ro"),
        "input": encode_task(request.input, "A task"),
        "mode": None if request.mode is None else request.mode.value,
        "resources_id": request.resources_id,
        "status": RolloutStatus.QUEUING.value,
        "config": encode_config(request.config),
        "metadata": encode_metadata(request.metadata),
        **place_of(request.metadata),
        "run_id": checked_id(request.run_id, "A run_id") if request.run_id else None,
        "attempts": 0,
        "failures": 0,
        "infra_failures": 0,
    }


def place_of(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns that rollouts of a step or a group are found by."""
    return {"step": step_in(metadata or {}), "group_id": group_in(metadata or {})}


def create(tx: Transaction, new: NewRollout) -> Rollout:
    """Enqueue. A rollout_id that is there already returns what is stored."""
    values = {**new, "start_time": tx.now, "available_at": tx.now}
    if values["resources_id"] is None and (latest := tx.row(_latest_resources, {})) is not None:
        values["resources_id"] = latest[0]
    if not tx.run(_insert, values):
        return _existing(tx, values["rollout_id"], values["input"])
    tx.changes.moved("rollouts", None, RolloutStatus.QUEUING)
    tx.changes.queued[values["run_id"]] += 1
    return to_rollout([values.get(name) for name in ROLLOUT_FIELDS])


def _existing(tx: Transaction, rollout_id: str, task: str) -> Rollout:
    row = tx.row(_select, {"rollout": rollout_id})
    assert row is not None
    if row[1] != task:
        raise ConflictError(f"Rollout '{rollout_id}' exists already, with another input. Give each rollout its own id.")
    return to_rollout(row)


def start(tx: Transaction, new: NewRollout, worker_id: str | None, attempt_id: str | None) -> AttemptedRollout:
    """Create a rollout and claim it in one step."""
    if attempt_id is not None:
        _check_free(tx, attempt_id, new["rollout_id"])
    rollout = create(tx, new)
    state = attempts.load_rollout(tx, rollout.rollout_id)
    if state.attempts == 0:
        tx.changes.queued[state.run_id] -= 1
        return _start_attempt(tx, rollout, state, worker_id, attempt_id)
    if attempt_id is not None and attempt_id != state.latest_attempt_id:
        raise ConflictError(
            f"Rollout '{rollout.rollout_id}' was started before, with attempt '{state.latest_attempt_id}'."
        )
    return _require(tx, rollout.rollout_id)


def start_attempt(tx: Transaction, rollout_id: str, worker_id: str | None, attempt_id: str | None) -> AttemptedRollout:
    """Claim one certain rollout."""
    if attempt_id is not None and (taken := _check_free(tx, attempt_id, rollout_id)) is not None:
        return _repeat(tx, taken)
    state = attempts.load_rollout(tx, rollout_id)
    row = tx.row(_select, {"rollout": rollout_id})
    assert row is not None
    return _start_attempt(tx, to_rollout(row), state, worker_id, attempt_id)


def _check_free(tx: Transaction, attempt_id: str, rollout_id: str) -> Attempt | None:
    """The attempt of this id, if the rollout has it. Raises `ConflictError` if another rollout has it."""
    taken = attempts.read(tx, attempt_id)
    if taken is not None and taken.rollout_id != rollout_id:
        raise ConflictError(
            f"Attempt '{attempt_id}' exists already, in rollout '{taken.rollout_id}'. Give each attempt its own id."
        )
    return taken


def _start_attempt(
    tx: Transaction, rollout: Rollout, state: RolloutState, worker_id: str | None, attempt_id: str | None
) -> AttemptedRollout:
    (attempt,) = attempts.start(tx, [(state, attempt_id)], worker_id)
    return _attempted(rollout, attempt)


def _attempted(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    values = dict(rollout.__dict__)
    values["status"] = RolloutStatus.PREPARING
    return AttemptedRollout.model_construct(**values, attempt=attempt)


def claim(
    tx: Transaction,
    limit: int,
    worker_id: str | None,
    attempt_ids: Sequence[str] | None,
    run_id: str | None = None,
) -> list[AttemptedRollout]:
    """Claim up to `limit` queued rollouts, oldest first; claims repeated by their attempt_id come first.

    With a `run_id` those of this run and then those of no run; without one those of all.
    """
    claims: list[AttemptedRollout] = []
    fresh: list[str | None] = [None] * limit
    if attempt_ids is not None:
        wanted = list(dict.fromkeys(attempt_ids[:limit]))
        claims = [_repeat(tx, attempt) for attempt in attempts.read_many(tx, wanted)]
        # A repeated request gets what the first one got, not more: the other ids found an empty queue then.
        fresh = [] if claims else [*wanted]
    if fresh:
        rows = _queued(tx, run_id, len(fresh))
        states = [RolloutState._make(row[_SPLIT:]) for row in rows]
        begun = attempts.start(tx, list(zip(states, fresh, strict=False)), worker_id)
        claims += [_attempted(to_rollout(row[:_SPLIT]), attempt) for row, attempt in zip(rows, begun, strict=True)]
    if not claims and worker_id is not None:
        workers.found_nothing(tx, worker_id)
    return claims


def _queued(tx: Transaction, run_id: str | None, limit: int) -> list[Row]:
    if run_id is None:
        return tx.rows(_queue_of_all, {"now": tx.now, "limit": limit})
    found = tx.rows(_queue_of_run, {"now": tx.now, "limit": limit, "run": run_id})
    if len(found) < limit:
        found += tx.rows(_queue_of_none, {"now": tx.now, "limit": limit - len(found)})
    return found


def _repeat(tx: Transaction, attempt: Attempt) -> AttemptedRollout:
    """The claim made before under this attempt's id, whose answer may have been lost."""
    state, rollout_state = attempts.load(tx, attempt.rollout_id, attempt.attempt_id)
    (status,) = attempts.keep_alive(tx, [attempts.Sign(state, rollout_state, running=False)])
    if status in FINISHED_ATTEMPT:
        raise ConflictError(f"Attempt '{attempt.attempt_id}' has ended as {status}; claim under a new attempt_id.")
    return _require(tx, attempt.rollout_id)


def unclaim(tx: Transaction, rollout_id: str, attempt_id: str, last_sign: float | None) -> None:
    """Undo a claim that nobody received: as if the rollout had never been handed out.

    `last_sign` is the claim's `last_heartbeat_time`: where it is another one by now, the claim was repeated or its
    worker has been heard of, so somebody has it.
    """
    attempt, rollout = attempts.load(tx, rollout_id, attempt_id)
    if attempt.last_heartbeat_time != last_sign:
        return
    (used,) = tx.rows(_count_spans, {"rollout": rollout_id, "attempt": attempt_id})[0]
    if attempt.status != AttemptStatus.PREPARING or rollout.latest_attempt_id != attempt_id or used:
        return
    tx.run(_delete_attempt, {"attempt": attempt_id})
    previous = tx.row(_previous, {"rollout": rollout_id})
    status = RolloutStatus.QUEUING if previous is None else RolloutStatus.REQUEUING
    tx.run(
        _unclaim,
        {
            "rollout": rollout_id,
            "attempt": attempt_id,
            "status": status.value,
            "available_at": tx.now,
            "attempts": rollout.attempts - 1,
            "latest_attempt_id": None if previous is None else previous[0],
        },
    )
    tx.changes.counts["attempts.preparing"] -= 1
    tx.changes.moved("rollouts", rollout.status, status)
    tx.changes.queued[rollout.run_id] += 1
    if attempt.worker_id is not None:
        workers.released(tx, attempt.worker_id, responsive=True)


def count_due(tx: Transaction, since: float) -> dict[str | None, int]:
    """How many rollouts of each run became claimable after `since` because their wait is over."""
    return dict(tx.rows(_due, {"since": since, "now": tx.now}))


def read(tx: Transaction, rollout_id: str) -> AttemptedRollout | Rollout | None:
    row = tx.row(_select_both, {"rollout": rollout_id})
    return None if row is None else to_either(row)


def to_either(row: Row) -> AttemptedRollout | Rollout:
    """From a row of `SELECT_WITH_ATTEMPT`."""
    if row[_SPLIT] is None:
        return to_rollout(row[:_SPLIT])
    values = rollout_values(row[:_SPLIT])
    return AttemptedRollout.model_construct(**values, attempt=to_attempt(row[_SPLIT:]))


def read_many(tx: Transaction, rollout_ids: Sequence[str]) -> dict[str, Rollout]:
    """The rollouts that exist among these, with their latest attempts, in the order asked for."""
    if not rollout_ids:
        return {}
    found = {row[0]: to_either(row) for row in tx.rows(_select_many, {"rollouts": Ids(rollout_ids)})}
    return {rollout_id: found[rollout_id] for rollout_id in rollout_ids if rollout_id in found}


def read_finished(tx: Transaction, rollout_ids: Sequence[str]) -> list[Rollout]:
    """The rollouts that are finished among these, in the order asked for. Raises `NotFoundError` if one does not exist.

    Who waits for thousands asks again whenever one ends: only the finished ones are made into objects.
    """
    status: dict[str, str] = dict(tx.rows(_select_status, {"rollouts": Ids(rollout_ids)}))
    missing = next((rollout_id for rollout_id in rollout_ids if rollout_id not in status), None)
    if missing is not None:
        raise NotFoundError(f"There is no rollout '{missing}' in the store; waiting for it would never end.")
    finished = [rollout_id for rollout_id in rollout_ids if status[rollout_id] in FINISHED_ROLLOUT]
    return list(read_many(tx, finished).values())


def _require(tx: Transaction, rollout_id: str) -> AttemptedRollout:
    found = read(tx, rollout_id)
    assert isinstance(found, AttemptedRollout)
    return found


def update_rollout(tx: Transaction, rollout_id: str, status: RolloutStatus | Unset, changes: dict[str, Any]) -> Rollout:
    """Write `changes` (columns, encoded) and the status; an open attempt follows a status set by hand."""
    state = attempts.load_rollout(tx, rollout_id)
    if changes:
        current = tx.row(_select, {"rollout": rollout_id})
        assert current is not None
        stored = dict(zip(ROLLOUT_FIELDS, current, strict=True))
        names = ("input", "mode", "resources_id", "config", "metadata")
        tx.run(_update_details, {"rollout": rollout_id, **{n: changes.get(n, stored[n]) for n in names}})
        if "metadata" in changes:
            place = {name: changes[name] for name in ("step", "group_id")}
            tx.run(_update_place, {"rollout": rollout_id, **place})
        state = attempts.load_rollout(tx, rollout_id)
    if not isinstance(status, Unset) and status != state.status:
        _set_status(tx, state, status)
    row = tx.row(_select, {"rollout": rollout_id})
    if row is None:
        raise NotFoundError(f"There is no rollout '{rollout_id}' in the store.")
    return to_rollout(row)


def _set_status(tx: Transaction, state: RolloutState, status: RolloutStatus) -> None:
    attempts.check_rollout(state, status, by_hand=True)
    follower = lifecycle.ATTEMPT_FOLLOWS.get(status)
    if follower is None:
        raise ConflictError(
            f"Rollout '{state.rollout_id}' becomes {status} through its attempts only; claim it with dequeue_rollout "
            "or start_attempt, or report with update_attempt."
        )
    if state.latest_attempt_id is not None:
        attempt, _ = attempts.load(tx, state.rollout_id, state.latest_attempt_id)
        if attempt.status not in FINISHED_ATTEMPT:
            attempts.close(tx, attempt, follower, None, f"The rollout was set to {status} by hand.")
    verdict = lifecycle.AttemptVerdict(status, state.failures, state.infra_failures)
    attempts.settle(tx, state, verdict, by_hand=True)


def changed_columns(
    input: Any | Unset = UNSET,
    mode: RolloutMode | Unset | None = UNSET,
    resources_id: str | Unset | None = UNSET,
    config: Any | Unset = UNSET,
    metadata: dict[str, Any] | Unset | None = UNSET,
) -> dict[str, Any]:
    """The columns that an update sets, encoded."""
    changes: dict[str, Any] = {}
    if not isinstance(input, Unset):
        changes["input"] = encode_task(input, "A task")
    if not isinstance(mode, Unset):
        changes["mode"] = None if mode is None else RolloutMode(mode).value
    if not isinstance(resources_id, Unset):
        changes["resources_id"] = resources_id
    if not isinstance(config, Unset):
        changes["config"] = encode_config(config)
    if not isinstance(metadata, Unset):
        changes |= {"metadata": encode_metadata(metadata), **place_of(metadata)}
    return changes
