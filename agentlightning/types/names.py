"""Names of the spans this system writes itself, and the attribute keys they carry. Constants only."""

from __future__ import annotations

ANNOTATION = "agentlightning.annotation"
"""Span: attributes the agent attaches to its attempt."""
MESSAGE = "agentlightning.message"
"""Span: a line of text; key `MESSAGE_BODY`."""
OBJECT = "agentlightning.object"
"""Span: a JSON value; keys `OBJECT_TYPE`, `OBJECT_JSON`."""
EXCEPTION = "agentlightning.exception"
"""Span: an exception the agent met; keys as in OpenTelemetry: `exception.type`, `.message`, `.stacktrace`."""
OPERATION = "agentlightning.operation"
"""Span: a piece of the agent's work with a start and an end; keys `OPERATION_NAME`, `_INPUT`, `_OUTPUT`."""
REWARD = "agentlightning.reward"
"""Span: one or more named rewards (see `types.reward`). Also the prefix of their attribute keys."""
VIRTUAL = "agentlightning.virtual"
"""Span: made by the system, not measured, where a trace needs a node."""

MESSAGE_BODY = "agentlightning.message.body"
OBJECT_TYPE = "agentlightning.object.type"
OBJECT_JSON = "agentlightning.object.json"
OPERATION_NAME = "agentlightning.operation.name"
OPERATION_INPUT = "agentlightning.operation.input"
OPERATION_OUTPUT = "agentlightning.operation.output"

EXCEPTION_TYPE = "exception.type"
EXCEPTION_MESSAGE = "exception.message"
EXCEPTION_STACKTRACE = "exception.stacktrace"

ROLLOUT_ID = "agentlightning.rollout_id"
"""Resource attribute on spans that come in over OTLP; likewise the next two."""
ATTEMPT_ID = "agentlightning.attempt_id"
SPAN_SEQUENCE_ID = "agentlightning.span_sequence_id"
