"""What goes over the wire between a store's server and its client besides the operations' bodies: calls as msgpack.

Everything is JSON but calls, whose arrays go as their bytes. Nothing here executes what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pydantic import BaseModel, TypeAdapter

from agentlightning.errors import AgentLightningError, StoreError
from agentlightning.store.operations.calls import CallTable
from agentlightning.store.operations.query import RecordTable
from agentlightning.types import AttemptedRollout, CallRecord, Rollout, Span
from agentlightning.types.arrays import HAS_NUMPY, Float32Array, Int32Array, float32_array, int32_array, np

PREFIX = "/v1/agl"
OTLP_PATH = "/v1/traces"
METRICS_PATH = "/metrics"
JSON, MSGPACK, PROTOBUF = "application/json", "application/vnd.msgpack", "application/x-protobuf"
MAX_WAIT_SECONDS = 30.0
"""The longest long poll of one request; the client repeats it."""
NOTHING_AT = "There is nothing at"
"""How a server begins that has no such path."""


class Problem(BaseModel):
    """RFC 9457: what went wrong and what to do next."""

    type: Literal["about:blank"] = "about:blank"
    title: str
    status: int
    code: str = AgentLightningError.code
    """For programs: it stays as it is when words change."""
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
