"""What goes over the wire between a store's server and its client: the bodies of requests, and calls as msgpack.

Everything is JSON but calls, whose arrays go as their bytes. Nothing here executes what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from agentlightning.errors import StoreError
from agentlightning.store.operations.calls import CallTable
from agentlightning.store.operations.records import RecordTable
from agentlightning.types import (
    AttemptedRollout,
    AttemptStatus,
    CallRecord,
    EnqueueRolloutRequest,
    Outcome,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    Run,
    RunStatus,
    Span,
)
from agentlightning.types.arrays import HAS_NUMPY, Float32Array, Int32Array, float32_array, int32_array, np

PREFIX = "/v1/agl"
OTLP_PATH = "/v1/traces"
MSGPACK = "application/vnd.msgpack"
MAX_WAIT_SECONDS = 30.0
"""The longest long poll of one request; the client repeats it."""


class Body(BaseModel):
    """A request's body: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class Enqueue(Body):
    rollouts: list[EnqueueRolloutRequest]


class Dequeue(Body):
    worker_id: str | None = None
    limit: int = Field(default=1, ge=1, le=10_000)
    timeout: float = Field(default=0.0, ge=0.0, le=MAX_WAIT_SECONDS)
    attempt_ids: list[str] | None = None
    run_id: str | None = None


class StartRollout(EnqueueRolloutRequest):
    worker_id: str | None = None
    attempt_id: str | None = None


class StartAttempt(Body):
    worker_id: str | None = None
    attempt_id: str | None = None


class UpdateRollout(Body):
    """Only the fields that are given are changed."""

    input: Any = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = RolloutStatus.QUEUING
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: dict[str, Any] | None = None


class UpdateAttempt(Body):
    """Only the fields that are given are changed."""

    status: AttemptStatus = AttemptStatus.PREPARING
    worker_id: str = ""
    last_heartbeat_time: float = 0.0
    metadata: dict[str, Any] | None = None
    outcome: Outcome = Outcome.OK
    error: str | None = None


class AttemptChange(Body):
    """One of many changes in one request."""

    rollout_id: str
    attempt_id: str
    change: UpdateAttempt


class Wait(Body):
    rollout_ids: list[str]
    timeout: float = Field(default=0.0, ge=0.0, le=MAX_WAIT_SECONDS)
    any: bool = False
    """True: return when one is finished; False: when all are."""


class Heartbeat(Body):
    """Without `heartbeat_stats` the stored ones stay."""

    heartbeat_stats: dict[str, Any] | None = None
    attempt_ids: list[str] | None = None
    """What the worker holds; None: all that it claimed."""


class Release(Body):
    error: str
    quiet_seconds: float = Field(default=0.0, ge=0.0)


class Presence(Body):
    timeout: float = Field(default=0.0, ge=0.0, le=MAX_WAIT_SECONDS)


class NewResources(Body):
    resources: dict[str, dict[str, Any]]
    resources_id: str | None = None


class SearchCalls(Body):
    rollout_ids: list[str]
    latest_attempt_only: bool = True


class SearchRecords(Body):
    rollout_ids: list[str]


class NextSequence(Body):
    rollout_id: str
    attempt_id: str


class BeginRun(Body):
    run: Run
    first_step: int = 0


class UpdateRun(Body):
    """Only the fields that are given are changed."""

    status: RunStatus = RunStatus.RUNNING
    state: dict[str, Any] = Field(default_factory=dict)
    error: str | None = None


class Problem(BaseModel):
    """RFC 9457: what went wrong and what to do next."""

    type: Literal["about:blank"] = "about:blank"
    title: str
    status: int
    detail: str


def _to_wire(value: Any) -> Any:
    if HAS_NUMPY and isinstance(value, np.ndarray):
        little = value.dtype.newbyteorder("<")
        return value.astype(little, copy=False).tobytes()
    if isinstance(value, Span):
        return value.model_dump_json()
    raise StoreError(f"A value of type {type(value).__name__} cannot be part of a call.")


def _from_wire(kind: Any, value: Any) -> Any:
    if kind == Int32Array:
        return int32_array(value)
    if kind == Float32Array:
        return float32_array(value)
    if kind is Span:
        return Span.model_validate_json(value)
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_records = msgspec.msgpack.Decoder(list[CallRecord], dec_hook=_from_wire)
_table = msgspec.msgpack.Decoder(CallTable)


def encode_records(records: Sequence[CallRecord]) -> bytes:
    return _encoder.encode(records)


def decode_records(data: bytes) -> list[CallRecord]:
    """Raises `StoreError` for bytes that are no call records."""
    try:
        return _records.decode(data)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise StoreError(f"The body is not a msgpack list of call records: {error}.") from error


rollout_list = TypeAdapter[list[AttemptedRollout | Rollout]](list[AttemptedRollout | Rollout])
_span_list = TypeAdapter(list[Span])


class _Records(msgspec.Struct, array_like=True):
    """Rollouts and spans as JSON, calls as their table."""

    rollouts: bytes
    spans: bytes
    calls: CallTable


_records_table = msgspec.msgpack.Decoder(_Records)


def encode_record_table(table: RecordTable) -> bytes:
    return _encoder.encode(
        _Records(rollout_list.dump_json(table.rollouts), _span_list.dump_json(table.spans), table.calls)
    )


def decode_record_table(data: bytes) -> RecordTable:
    parts = _records_table.decode(data)
    return RecordTable(rollout_list.validate_json(parts.rollouts), _span_list.validate_json(parts.spans), parts.calls)


def encode_table(table: CallTable) -> bytes:
    return _encoder.encode(table)


def decode_table(data: bytes) -> CallTable:
    return _table.decode(data)
