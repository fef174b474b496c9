"""Statuses, modes and outcomes, and the tables of which status may follow which.

The store changes a status only by a compare-and-set that these tables allow.
"""

from __future__ import annotations

from enum import StrEnum


class RolloutMode(StrEnum):
    """What a rollout is for: its calls train the policy, validate it, or test it."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


class RolloutStatus(StrEnum):
    """Where a rollout stands; follows the status of its latest attempt."""

    QUEUING = "queuing"
    PREPARING = "preparing"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    CANCELLED = "cancelled"
    REQUEUING = "requeuing"


class AttemptStatus(StrEnum):
    """Where one try at a rollout stands."""

    PREPARING = "preparing"
    RUNNING = "running"
    FAILED = "failed"
    SUCCEEDED = "succeeded"
    UNRESPONSIVE = "unresponsive"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class WorkerStatus(StrEnum):
    IDLE = "idle"
    BUSY = "busy"
    UNKNOWN = "unknown"


class Outcome(StrEnum):
    """Why an attempt ended. A failure is never silently a reward of 0."""

    OK = "ok"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    INFRA_ERROR = "infra_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


_R, _A = RolloutStatus, AttemptStatus

FINISHED_ROLLOUT = frozenset({_R.FAILED, _R.SUCCEEDED, _R.CANCELLED})
FINISHED_ATTEMPT = frozenset({_A.FAILED, _A.SUCCEEDED, _A.UNRESPONSIVE, _A.TIMEOUT, _A.CANCELLED})

ROLLOUT_TRANSITIONS: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    _R.QUEUING: frozenset({_R.PREPARING, _R.CANCELLED}),
    _R.REQUEUING: frozenset({_R.PREPARING, _R.CANCELLED, _R.RUNNING, _R.SUCCEEDED}),
    _R.PREPARING: frozenset({_R.RUNNING, _R.SUCCEEDED, _R.FAILED, _R.REQUEUING, _R.CANCELLED}),
    _R.RUNNING: frozenset({_R.SUCCEEDED, _R.FAILED, _R.REQUEUING, _R.CANCELLED}),
    _R.SUCCEEDED: frozenset(),
    _R.FAILED: frozenset(),
    _R.CANCELLED: frozenset(),
}

ROLLOUT_BY_HAND: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    status: following if status in FINISHED_ROLLOUT else following | FINISHED_ROLLOUT
    for status, following in ROLLOUT_TRANSITIONS.items()
}
"""What `update_rollout(status=…)` may do besides: end a rollout from wherever it is. What has ended stays ended."""

ATTEMPT_TRANSITIONS: dict[AttemptStatus, frozenset[AttemptStatus]] = {
    _A.PREPARING: frozenset({_A.RUNNING, *FINISHED_ATTEMPT}),
    _A.RUNNING: FINISHED_ATTEMPT,
    # A worker that was only slow may come back while its attempt is still the latest one.
    _A.UNRESPONSIVE: frozenset({_A.RUNNING, _A.SUCCEEDED, _A.FAILED, _A.TIMEOUT, _A.CANCELLED}),
    _A.SUCCEEDED: frozenset(),
    _A.FAILED: frozenset(),
    _A.TIMEOUT: frozenset(),
    _A.CANCELLED: frozenset(),
}
