"""From what an emitter was given to a span in the current trace: attributes made plain, parent and ids filled in."""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, from_json, to_json

from agentlightning.errors import KindError, NotJsonError, message_of
from agentlightning.keys import redacted
from agentlightning.tracer.trace import Trace, current_parent, current_trace
from agentlightning.types import Attributes, Span, SpanStatus
from agentlightning.types.names import EXCEPTION_MESSAGE, EXCEPTION_STACKTRACE, EXCEPTION_TYPE

logger = logging.getLogger(__name__)

_warned: set[str] = set()
_LENIENT: dict[str, Any] = {"bytes_mode": "base64", "inf_nan_mode": "strings"}
"""Bytes, NaN and infinity have no JSON of their own; they are written as text."""


def trace_for(emitter: str) -> Trace | None:
    """The current trace. Outside a rollout None, with a warning the first time this emitter is used so."""
    trace = current_trace()
    if trace is None and emitter not in _warned:
        _warned.add(emitter)
        logger.warning("%s was called outside a rollout: nothing is recorded (said once).", emitter)
    return trace


def record(trace: Trace, name: str, attributes: Attributes, status: SpanStatus | None = None) -> Span | None:
    """A span without duration in the trace; None when the trace is over."""
    trace_id, parent_id = current_parent(trace)
    span = Span.from_attributes(
        attributes=attributes,
        rollout_id=trace.rollout_id,
        attempt_id=trace.attempt_id,
        name=name,
        trace_id=trace_id,
        parent_id=parent_id,
        status=status,
    )
    return span if trace.add(span) else None


def plain(attributes: Mapping[str, Any] | None) -> Attributes:
    """Attributes as JSON values under dotted keys: {"tool": {"name": "calc"}} is {"tool.name": "calc"}.

    Raises NotJsonError for a value that JSON cannot hold, and KindError for attributes without names.
    """
    if attributes is not None and not isinstance(attributes, Mapping):
        raise KindError(f"The attributes are {attributes!r}; they have names: {{'plan': …}}.")
    flat: Attributes = {}
    for key, value in (attributes or {}).items():
        value = from_json(strict_json(value, f"The attribute '{key}'"))
        if isinstance(value, dict) and value:
            flat.update({f"{key}.{inner}": v for inner, v in plain(value).items()})
        else:
            flat[key] = value
    return flat


def json_or_repr(value: Any) -> str:
    """The value as JSON text; what JSON cannot hold is written as its repr. Never fails: the value is the agent's."""
    try:
        return to_json(value, fallback=repr, **_LENIENT).decode()
    except Exception:  # a circle, half a character, a serializer or a repr of the agent's own that fails
        return json.dumps(_repr(value))


def _repr(value: Any) -> str:
    try:
        return repr(value).encode("utf-8", "backslashreplace").decode()
    except Exception as error:  # a __repr__ of the agent's own
        return f"<{type(value).__name__} without a repr: {type(error).__name__}>"


def exact_json(value: Any, *, sort_keys: bool = False) -> str | None:
    """The value as JSON text that reads back as the very same value; None where there is no such text.

    A tuple, a date, a record, a number of numpy's have none: they would come back as something else.
    """
    try:
        return json.dumps(value, allow_nan=False, sort_keys=sort_keys) if _is_json(value) else None
    except (RecursionError, ValueError):  # a circle, NaN or infinity, an integer of too many digits
        return None


def _is_json(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_json(one) for key, one in value.items())
    if type(value) is list:
        return all(map(_is_json, value))
    return value is None or type(value) in (str, bool, int, float)


def strict_json(value: Any, what: str) -> str:
    """The value as JSON text. Raises NotJsonError, naming it as `what`, if it cannot be."""
    try:
        return to_json(value, **_LENIENT).decode()
    except (PydanticSerializationError, ValueError) as error:
        why = f"{what} cannot be written as JSON ({error}); give numbers, text, lists or dicts."
        raise NotJsonError(why) from error


def exception_attributes(error: BaseException) -> Attributes:
    """An exception as OpenTelemetry's attributes, with keys in its text shortened: HTTP clients name the URL."""
    kind = type(error)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        EXCEPTION_TYPE: f"{module}{kind.__qualname__}",
        EXCEPTION_MESSAGE: redacted(message_of(error)),
        EXCEPTION_STACKTRACE: redacted("".join(traceback.format_exception(error))),
    }


def error_status(error: BaseException) -> SpanStatus:
    return SpanStatus(status_code="ERROR", description=redacted(f"{type(error).__name__}: {message_of(error)}"))
