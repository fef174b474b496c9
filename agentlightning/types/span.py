"""Spans: OpenTelemetry-shaped records of what happened in an attempt."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from agentlightning.keys import redacted
from agentlightning.types.ids import random_hex
from agentlightning.types.names import VIRTUAL
from agentlightning.types.rollout import Record

Attributes = dict[str, Any]


class SpanStatus(Record):
    """`status_code` is UNSET, OK or ERROR, as in OpenTelemetry."""

    status_code: str = "UNSET"
    description: str | None = None


class Event(Record):
    name: str
    attributes: Attributes = Field(default_factory=dict)
    timestamp: float | None = None


class SpanContext(Record):
    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: dict[str, str] = Field(default_factory=dict)


class Link(Record):
    context: SpanContext
    attributes: Attributes | None = None


class OtelResource(Record):
    attributes: Attributes = Field(default_factory=dict)
    schema_url: str = ""


class Span(Record):
    """One record of what happened in an attempt. Times are seconds since the epoch.

    `sequence_id` orders the spans of an attempt; 0 asks the store to give the next number inside the insert.
    """

    rollout_id: str
    attempt_id: str
    sequence_id: int = 0
    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    parent_id: str | None = None
    """The span in which this one happened."""
    name: str
    status: SpanStatus = Field(default_factory=SpanStatus)
    attributes: Attributes = Field(default_factory=dict)
    events: list[Event] = Field(default_factory=list)
    """Moments within it, with a name, a time and attributes."""
    links: list[Link] = Field(default_factory=list)
    """Other spans that it refers to."""
    start_time: float | None = None
    end_time: float | None = None
    context: SpanContext | None = None
    parent: SpanContext | None = None
    resource: OtelResource = Field(default_factory=OtelResource)

    @classmethod
    def from_attributes(
        cls,
        *,
        attributes: Attributes,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        name: str = VIRTUAL,
        sequence_id: int = 0,
        trace_id: str | None = None,
        span_id: str | None = None,
        parent_id: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        status: SpanStatus | None = None,
    ) -> Span:
        """A span made from plain attributes; ids and times that are not given are made here."""
        now = time.time()
        return cls(
            rollout_id=rollout_id or random_hex(8),
            attempt_id=attempt_id or random_hex(8),
            sequence_id=sequence_id,
            trace_id=trace_id or random_hex(16),
            span_id=span_id or random_hex(8),
            parent_id=parent_id,
            name=name,
            attributes=attributes,
            start_time=now if start_time is None else start_time,
            end_time=now if end_time is None else end_time,
            status=status or SpanStatus(status_code="OK"),
        )

    @classmethod
    def from_opentelemetry(cls, src: Any, rollout_id: str, attempt_id: str, sequence_id: int = 0) -> Span:
        """A span made from an OpenTelemetry SDK `ReadableSpan`."""
        context = src.get_span_context()
        parent = src.parent

        why = src.status.description
        return cls(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=sequence_id,
            trace_id=f"{context.trace_id:032x}",
            span_id=f"{context.span_id:016x}",
            parent_id=f"{parent.span_id:016x}" if parent else None,
            name=redacted(src.name),
            status=SpanStatus(status_code=src.status.status_code.name, description=why and redacted(why)),
            attributes=_plain(src.attributes),
            events=[
                Event(name=e.name, attributes=_plain(e.attributes), timestamp=_seconds(e.timestamp)) for e in src.events
            ],
            links=[Link(context=_context_of(link.context), attributes=_plain(link.attributes)) for link in src.links],
            start_time=_seconds(src.start_time),
            end_time=_seconds(src.end_time),
            context=_context_of(context),
            parent=_context_of(parent) if parent else None,
            resource=OtelResource(attributes=_plain(src.resource.attributes), schema_url=src.resource.schema_url or ""),
        )


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9


def _context_of(given: Any) -> SpanContext:
    return SpanContext(
        trace_id=f"{given.trace_id:032x}",
        span_id=f"{given.span_id:016x}",
        is_remote=given.is_remote,
        trace_state=dict(given.trace_state or {}),
    )


def _plain(attributes: Any) -> Attributes:
    """With attempts' keys shortened: HTTP clients and their instrumentation name the URL."""
    return {key: _redacted(value) for key, value in (attributes or {}).items()}


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        return redacted(value)
    return [_redacted(item) for item in value] if isinstance(value, tuple | list) else value
