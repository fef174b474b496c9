"""Rollouts, attempts and workers: the records the store keeps about work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning.arguments import as_number, of_validator, refuse_unknown
from agentlightning.errors import ConfigError
from agentlightning.types.html import fields_html
from agentlightning.types.status import AttemptStatus, Outcome, RolloutMode, RolloutStatus, WorkerStatus

SAMPLING_SEED = "sampling_seed"
"""The key of a rollout's metadata with a whole number from which the seeds of its calls are made. Rollouts of two
models, or with two prompts, that have the same one draw alike (common random numbers), so that their rewards differ by
what is compared more than by chance. The engine has to honour seeds."""
DEFAULT_TIMEOUT_SECONDS = 3600.0
TIMEOUT_SETTING = "The limit is timeout_seconds of the rollout's RolloutConfig, or --timeout on the command line."
DEFAULT_LEASE_SECONDS = 60.0


class Record(BaseModel):
    """Base of all records: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class InvalidRecord(ConfigError, ValueError):
    """A field of a record has an invalid value or none, or does not exist."""


def _field_names(kind: type[BaseModel]) -> list[str]:
    """The fields of a record, the required ones first."""
    fields = sorted(kind.model_fields.items(), key=lambda item: not item[1].is_required())
    return [known for name, field in fields for known in (name, field.alias) if known]


def _reasons(name: str, error: ValidationError) -> str:
    words = []
    for e in error.errors(include_url=False):
        field, why = ".".join(map(str, e["loc"])), f"{of_validator(e['msg'])}.{as_number(e['input'])}"
        wrong = f"{name}.{field} is {e['input']!r:.80}; {why}" if field else f"{name}: {why}"
        words.append(f"{name} needs {field}: {name}({field}=…)." if e["type"] == "missing" else wrong)
    return " ".join(words)


if TYPE_CHECKING:  # type checkers and editors look at the fields
    GivenRecord = Record
else:

    class _Explains(type(BaseModel)):
        """Says which field was meant or forgotten where a person makes a record. What is read is not made by a call."""

        def __call__(cls, *positional: Any, **given: Any) -> Any:
            try:
                if cls.model_config.get("extra") == "forbid":
                    refuse_unknown(cls.__name__, positional, given, _field_names(cls), None, noun="field")
                return super().__call__(**given)
            except ValidationError as error:
                raise InvalidRecord(_reasons(cls.__name__, error)) from None
            except ConfigError as error:
                raise InvalidRecord(str(error)) from None

    class GivenRecord(Record, metaclass=_Explains):
        """Base of the records that users make themselves."""


class RolloutConfig(GivenRecord):
    """How long an attempt may take and when a rollout is tried again.

    None means the system's default, not for ever: `timeout_seconds` an hour for the whole attempt,
    `unresponsive_seconds` a lease of 60 s kept alive by the runner's heartbeat. `max_attempts` counts the attempts
    that end in one of `retry_condition`; infra failures requeue outside of it, at most 3 times.
    """

    timeout_seconds: float | None = Field(default=None, gt=0)
    """Deadline of an attempt."""
    unresponsive_seconds: float | None = Field(default=None, gt=0)
    """How long its runner may be silent before an attempt counts as lost."""
    max_attempts: int = Field(default=1, ge=1)
    """Attempts that may end in one of `retry_condition`."""
    retry_condition: list[AttemptStatus] = Field(default_factory=list)
    """Endings of an attempt after which the rollout is tried again, for example ["failed", "timeout"]."""


class Attempt(Record):
    """One try at a rollout. Times are seconds since the epoch; `error` is the message and traceback of a failure."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    """1 for the first try, 2 for the second, …"""
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = AttemptStatus.PREPARING
    worker_id: str | None = None
    """The runner that claimed it."""
    last_heartbeat_time: float | None = None
    """When its runner was last heard of."""
    outcome: Outcome | None = None
    """Why it ended; None while it has not."""
    error: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


def step_in(metadata: Mapping[str, Any]) -> int | None:
    """See `Rollout.step`."""
    step = metadata.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**31 else None


def group_in(metadata: Mapping[str, Any]) -> str | None:
    """See `Rollout.group`."""
    group = metadata.get("group")
    return None if group is None else str(group)


class Rollout(Record):
    """One execution of the agent on one task (`input`), under one version of the resources.

    `metadata` is the user's; the algorithms use the keys `group` (siblings of the same task that GRPO compares)
    and `step`. `run_id` is the run it belongs to; None: to none, so that runners of any run may claim it.
    """

    rollout_id: str
    input: Any
    """The task, any JSON value."""
    start_time: float = Field(default_factory=time.time)
    end_time: float | None = None
    mode: RolloutMode | None = None
    """What it is for: training, validation or test. None: nothing in particular."""
    resources_id: str | None = None
    """The version of the resources that its agent is given; None: there were none."""
    status: RolloutStatus = RolloutStatus.QUEUING
    """Follows the status of its latest attempt."""
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] = Field(default_factory=dict)
    run_id: str | None = None

    @property
    def step(self) -> int | None:
        """The step that it belongs to by its metadata, where that says one; a user may write anything there."""
        return step_in(self.metadata)

    @property
    def group(self) -> str | None:
        """The group that it belongs to by its metadata, as text."""
        return group_in(self.metadata)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return fields_html(f"Rollout {self.rollout_id}", self.model_dump(mode="json", exclude={"rollout_id", "config"}))


class AttemptedRollout(Rollout):
    """A rollout together with the attempt that was handed out."""

    attempt: Attempt


class EnqueueRolloutRequest(Record):
    """One rollout to enqueue. A caller that gives `rollout_id` may repeat the request without harm."""

    input: Any
    """The task, any JSON value."""
    mode: RolloutMode | None = None
    resources_id: str | None = None
    """The version of the resources to run under; None: the latest when it is enqueued."""
    config: RolloutConfig | None = None
    metadata: dict[str, Any] | None = None
    rollout_id: str | None = None
    run_id: str | None = None
    """The run that it belongs to; None: runners of any run may claim it."""


class Worker(Record):
    """A runner as the store last heard of it."""

    worker_id: str
    status: WorkerStatus = WorkerStatus.UNKNOWN
    heartbeat_stats: dict[str, Any] | None = None
    """What the runner said of itself at its last heartbeat."""
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    """The rollout that it claimed last, while that is under way."""
    current_attempt_id: str | None = None
