"""OTLP/HTTP intake at /v1/traces: spans from any OpenTelemetry exporter, as protobuf or JSON, plain or gzipped.

A span says whose it is by the attributes `agentlightning.rollout_id` and `.attempt_id`, on itself or on its resource.
Those that do not are rejected in the partial-success part of the answer, as OTLP wants it.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from starlette.responses import Response

from agentlightning.errors import StoreError
from agentlightning.store.http import size
from agentlightning.store.http.wire import JSON, PROTOBUF
from agentlightning.types import Event, Link, OtelResource, Span, SpanContext, SpanStatus

ROLLOUT_KEY = "agentlightning.rollout_id"
ATTEMPT_KEY = "agentlightning.attempt_id"
SEQUENCE_KEY = "agentlightning.span_sequence_id"
MAX_BODY_BYTES = 64 * 2**20
"""After decompression."""
_STATUS_CODES = ("UNSET", "OK", "ERROR")
_ID_FIELDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")


def is_json(headers: Mapping[str, str]) -> bool:
    """Whether a body is written as JSON, and so its answer."""
    return headers.get("content-type", "").startswith(JSON)


def answer(rejected: int, why: str, *, is_json: bool) -> Response:
    """The answer to an exporter: how many spans were not taken, and why the first was not."""
    reply = ExportTraceServiceResponse()
    if rejected:
        reply.partial_success.rejected_spans = rejected
        reply.partial_success.error_message = why
    if is_json:
        return Response(json_format.MessageToJson(reply), media_type=JSON)
    return Response(reply.SerializeToString(), media_type=PROTOBUF)


def spans_in(is_json: bool, encoding: str, body: bytes) -> Iterator[Span | str]:
    """The spans of an export; for one that does not say whose or which it is, the reason why it is rejected.

    Raises `StoreError` for anything else, and for more than a request may hold.
    """
    plain = _decompress(body, encoding)
    export = _parse_json(plain) if is_json else _parse_protobuf(plain)
    if sum(len(scope.spans) for group in export.resource_spans for scope in group.scope_spans) > size.MAX_SPANS:
        raise size.too_many("spans", size.MAX_SPANS)
    return _to_spans(export)


def is_short(is_json: bool, encoding: str, body: bytes) -> bool:
    """Whether a body is read in a moment: it is short when unpacked, and says few things."""
    try:
        plain = zlib.decompressobj(wbits=31).decompress(body, size.SHORT_BYTES + 1) if encoding == "gzip" else body
        if is_json:
            return len(plain) <= size.SHORT_BYTES and size.values_of(plain) <= size.SHORT_FIELDS
        size.check_protobuf(plain, ExportTraceServiceRequest.DESCRIPTOR, size.SHORT_FIELDS)
    except size.TooMuch:
        return False
    except zlib.error:
        return True  # which is found out at once
    return len(plain) <= size.SHORT_BYTES


def _decompress(body: bytes, encoding: str) -> bytes:
    if encoding in ("", "identity"):
        return body
    if encoding != "gzip":
        raise StoreError(f"Content-Encoding '{encoding}' is not known; use gzip or none.")
    inflater = zlib.decompressobj(wbits=31)
    try:
        plain = inflater.decompress(body, MAX_BODY_BYTES)
    except zlib.error as error:
        raise StoreError(f"The body is not gzip: {error}.") from error
    if inflater.unconsumed_tail:
        raise size.TooMuch(f"The body has more than {MAX_BODY_BYTES >> 20} MiB; send smaller batches.")
    if not inflater.eof:
        raise StoreError("The body is not gzip: it breaks off.")
    return plain


def _parse_protobuf(body: bytes) -> ExportTraceServiceRequest:
    size.check_protobuf(body, ExportTraceServiceRequest.DESCRIPTOR)
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise StoreError(f"The body is not an OTLP trace export: {error}.") from error


def _parse_json(body: bytes) -> ExportTraceServiceRequest:
    """OTLP's JSON is protobuf's, but for ids, which are hex there and base64 here."""
    size.check_json(body)
    try:
        value = json.loads(body, object_hook=_ids_to_base64)
        return json_format.ParseDict(value, ExportTraceServiceRequest(), ignore_unknown_fields=True)
    except (ValueError, TypeError, AttributeError, RecursionError, json_format.ParseError) as error:
        raise StoreError(f"The body is not an OTLP trace export in JSON: {error}.") from error


def _ids_to_base64(value: dict[str, Any]) -> dict[str, Any]:
    for name in _ID_FIELDS:
        if isinstance(value.get(name), str):
            try:
                value[name] = base64.b64encode(bytes.fromhex(value[name])).decode()
            except (ValueError, binascii.Error) as error:
                raise StoreError(f"{name} '{value[name]}' is not a hexadecimal id.") from error
    return value


def _to_spans(export: ExportTraceServiceRequest) -> Iterator[Span | str]:
    for group in export.resource_spans:
        resource = OtelResource(attributes=_attributes(group.resource.attributes), schema_url=group.schema_url)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield _to_span(span, resource)


def _to_span(span: Any, resource: OtelResource) -> Span | str:
    attributes = _attributes(span.attributes)
    owner = {**resource.attributes, **attributes}
    rollout_id, attempt_id = owner.get(ROLLOUT_KEY), owner.get(ATTEMPT_KEY)
    if not isinstance(rollout_id, str) or not isinstance(attempt_id, str):
        return f"Span '{span.name}' has no {ROLLOUT_KEY} and {ATTEMPT_KEY}; set them as resource attributes."
    if not any(span.trace_id) or not any(span.span_id):
        return f"Span '{span.name}' has no trace id or no span id, without which it cannot be identified."
    sequence_id = owner.get(SEQUENCE_KEY, 0)
    trace_id, span_id, parent_id = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    code = span.status.code
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id if isinstance(sequence_id, int) and 0 <= sequence_id < 2**31 else 0,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id or None,
        name=span.name,
        status=SpanStatus(
            status_code=_STATUS_CODES[code] if 0 <= code < len(_STATUS_CODES) else "UNSET",
            description=span.status.message or None,
        ),
        attributes=attributes,
        events=[
            Event(name=event.name, attributes=_attributes(event.attributes), timestamp=event.time_unix_nano / 1e9)
            for event in span.events
        ],
        links=[
            Link(
                context=SpanContext(trace_id=link.trace_id.hex(), span_id=link.span_id.hex()),
                attributes=_attributes(link.attributes),
            )
            for link in span.links
        ],
        start_time=span.start_time_unix_nano / 1e9 or None,
        end_time=span.end_time_unix_nano / 1e9 or None,
        context=SpanContext(trace_id=trace_id, span_id=span_id, trace_state=_trace_state(span.trace_state)),
        parent=SpanContext(trace_id=trace_id, span_id=parent_id) if parent_id else None,
        resource=resource,
    )


def _trace_state(text: str) -> dict[str, str]:
    pairs = (item.strip().split("=", 1) for item in text.split(",") if "=" in item)
    return dict(pairs)


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return base64.b64encode(value.bytes_value).decode()
    if kind == "string_value":
        return value.string_value
    if kind == "int_value":
        return value.int_value
    if kind == "double_value":
        return value.double_value
    return value.bool_value if kind == "bool_value" else None
