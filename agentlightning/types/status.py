"""Statuses, modes and outcomes, and the tables of which status may follow which.

The store changes a status only by a compare-and-set that these tables allow.
"""

from __future__ import annotations

from enum import StrEnum


class RolloutMode(StrEnum):
    """What a rollout is for: its calls train the policy, validate it, or test it."""

    TRAIN = "train"
    """Its calls train the policy."""
    VAL = "val"
    """It validates the policy; nothing is learned from it."""
    TEST = "test"
    """It measures what has been trained."""


class RolloutStatus(StrEnum):
    """Where a rollout stands; follows the status of its latest attempt."""

    QUEUING = "queuing"
    """Waits to be claimed."""
    PREPARING = "preparing"
    """Claimed; nothing has happened in it yet."""
    RUNNING = "running"
    """Something was recorded in it."""
    FAILED = "failed"
    """Ended without success, and is not tried again."""
    SUCCEEDED = "succeeded"
    """Ended well."""
    CANCELLED = "cancelled"
    """Ended from outside."""
    REQUEUING = "requeuing"
    """Waits for another attempt."""


class AttemptStatus(StrEnum):
    """Where one try at a rollout stands."""

    PREPARING = "preparing"
    """Claimed; nothing has happened in it yet."""
    RUNNING = "running"
    """Something was recorded in it."""
    FAILED = "failed"
    """The agent, the judge or the system failed."""
    SUCCEEDED = "succeeded"
    """Ended well."""
    UNRESPONSIVE = "unresponsive"
    """Its runner is not heard of any more; it may come back."""
    TIMEOUT = "timeout"
    """Its deadline passed."""
    CANCELLED = "cancelled"
    """Ended from outside."""


class WorkerStatus(StrEnum):
    """What a runner is doing, as far as the store knows."""

    IDLE = "idle"
    """It waits for work."""
    BUSY = "busy"
    """It has claimed a rollout."""
    UNKNOWN = "unknown"
    """It has not been heard of for a while, or not yet."""


class Outcome(StrEnum):
    """Why an attempt ended. A failure is never silently a reward of 0."""

    OK = "ok"
    """The agent came to its end."""
    TRUNCATED = "truncated"
    """A limit of the run ended it: it ran out of calls, tokens or context, and did not go on. An answer that its
    request's own `max_tokens` cut off is a mark on the call (`finish_reason`)."""
    AGENT_ERROR = "agent_error"
    """The agent raised, gave no reward, or returned what is none."""
    INFRA_ERROR = "infra_error"
    """The system failed: a runner, a gateway, the store."""
    JUDGE_ERROR = "judge_error"
    """What gives the reward failed."""
    TIMEOUT = "timeout"
    """The deadline passed."""
    CANCELLED = "cancelled"
    """Ended from outside."""


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
