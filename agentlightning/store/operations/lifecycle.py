"""The rules of a rollout's life, as pure functions: no SQL, no clock.

Which status may follow which is in `types.status`; here is what the store decides by itself: what a rollout becomes
when its attempt ends, how long a retry waits, and when an attempt is overdue.
"""

from __future__ import annotations

from typing import NamedTuple

from agentlightning.types import AttemptStatus, Outcome, RolloutConfig, RolloutStatus
from agentlightning.types.rollout import DEFAULT_LEASE_SECONDS, DEFAULT_TIMEOUT_SECONDS

MAX_INFRA_RETRIES = 3
"""A rollout whose attempts die with their runner or gateway is tried again this often, outside of max_attempts."""
BACKOFF_SECONDS = 1.0
MAX_BACKOFF_SECONDS = 60.0

DEFAULT_OUTCOMES: dict[AttemptStatus, Outcome] = {
    AttemptStatus.SUCCEEDED: Outcome.OK,
    AttemptStatus.FAILED: Outcome.AGENT_ERROR,
    AttemptStatus.UNRESPONSIVE: Outcome.INFRA_ERROR,
    AttemptStatus.TIMEOUT: Outcome.TIMEOUT,
    AttemptStatus.CANCELLED: Outcome.CANCELLED,
}
"""The outcome of an attempt that ended without giving one."""

ATTEMPT_FOLLOWS: dict[RolloutStatus, AttemptStatus] = {
    RolloutStatus.SUCCEEDED: AttemptStatus.SUCCEEDED,
    RolloutStatus.FAILED: AttemptStatus.FAILED,
    RolloutStatus.CANCELLED: AttemptStatus.CANCELLED,
    RolloutStatus.REQUEUING: AttemptStatus.CANCELLED,
}
"""What the open attempt becomes when its rollout's status is set by hand."""


class AttemptVerdict(NamedTuple):
    """What a rollout becomes after its latest attempt ended; `delay` is the wait before a retry may be claimed."""

    status: RolloutStatus
    failures: int
    infra_failures: int
    delay: float = 0.0


def after_attempt(
    status: AttemptStatus, outcome: Outcome | None, config: RolloutConfig, failures: int, infra_failures: int
) -> AttemptVerdict:
    """The verdict on a rollout whose latest attempt ended in `status`.

    `failures` and `infra_failures` count the attempts that ended before: those that count against max_attempts and
    those that do not.
    """
    if status is AttemptStatus.SUCCEEDED:
        return AttemptVerdict(RolloutStatus.SUCCEEDED, failures, infra_failures)
    if status is AttemptStatus.CANCELLED:
        return AttemptVerdict(RolloutStatus.CANCELLED, failures, infra_failures)
    infra = status is AttemptStatus.UNRESPONSIVE or outcome is Outcome.INFRA_ERROR
    if infra and infra_failures < MAX_INFRA_RETRIES:
        return AttemptVerdict(RolloutStatus.REQUEUING, failures, infra_failures + 1, backoff(infra_failures))
    failures += 1
    if status in config.retry_condition and failures < config.max_attempts:
        return AttemptVerdict(RolloutStatus.REQUEUING, failures, infra_failures, backoff(failures - 1))
    return AttemptVerdict(RolloutStatus.FAILED, failures, infra_failures)


def backoff(retries: int) -> float:
    """Seconds before the next try, after `retries` earlier ones: doubling, capped."""
    return min(BACKOFF_SECONDS * 2.0 ** min(retries, 30), MAX_BACKOFF_SECONDS)


def limits(config: RolloutConfig) -> tuple[float, float]:
    """(lease, timeout) of an attempt in seconds."""
    return (
        DEFAULT_LEASE_SECONDS if config.unresponsive_seconds is None else config.unresponsive_seconds,
        DEFAULT_TIMEOUT_SECONDS if config.timeout_seconds is None else config.timeout_seconds,
    )


def deadline(now: float, lease: float, timeout_at: float) -> float:
    """When an attempt heard of just now is overdue."""
    return min(now + lease, timeout_at)
