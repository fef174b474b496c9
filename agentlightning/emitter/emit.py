"""The emitters: one function per kind of span. Each returns the span it recorded, or None outside a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

from agentlightning.arguments import explained
from agentlightning.emitter.record import (
    error_status,
    exception_attributes,
    plain,
    record,
    strict_json,
    trace_for,
)
from agentlightning.errors import KindError
from agentlightning.types import Attributes, Span
from agentlightning.types.names import (
    ANNOTATION,
    EXCEPTION,
    MESSAGE,
    MESSAGE_BODY,
    OBJECT,
    OBJECT_JSON,
    OBJECT_TYPE,
    REWARD_AGENT,
    REWARD_RESPONSE,
)
from agentlightning.types.reward import reward_attributes


@explained
def emit_reward(
    value: SupportsFloat | Mapping[str, SupportsFloat],
    primary_key: str | None = None,
    attributes: Mapping[str, Any] | None = None,
    *,
    agent: str | None = None,
    response_id: str | None = None,
) -> Span | None:
    """Reward the attempt: with a number, or with several named ones of which `primary_key` is the one that trains.

    The last reward of an attempt counts, and one with `response_id` only where there is no other. A reward belongs to
    the model call before it, or to the one whose response has `response_id`; with `agent` it is for that agent's calls
    alone, and where no reward is for everybody the mean of each agent's last one counts. Raises AgentError for anything
    but finite numbers, also outside a rollout, so that a mistake shows when the agent is tried by hand.
    """
    rewards = reward_attributes(value, primary_key)
    whose = {REWARD_AGENT: agent, REWARD_RESPONSE: response_id}
    trace = trace_for("emit_reward")
    if trace is None:
        return None
    named = {key: value for key, value in whose.items() if value is not None}
    return record(trace, ANNOTATION, {**plain(attributes), **named, **rewards})


@explained
def emit_message(message: str, attributes: Mapping[str, Any] | None = None) -> Span | None:
    """Record a line of text."""
    if not isinstance(message, str):
        raise KindError(f"emit_message takes text, not {type(message).__name__}; use emit_object for data.")
    trace = trace_for("emit_message")
    return None if trace is None else record(trace, MESSAGE, {**plain(attributes), MESSAGE_BODY: message})


@explained
def emit_object(object: Any, attributes: Mapping[str, Any] | None = None) -> Span | None:
    """Record a value as JSON. Raises NotJsonError for one that JSON cannot hold."""
    trace = trace_for("emit_object")
    if trace is None:
        return None
    text = strict_json(object, "The object")
    return record(trace, OBJECT, {**plain(attributes), OBJECT_TYPE: type(object).__qualname__, OBJECT_JSON: text})


@explained
def emit_exception(exception: BaseException, attributes: Mapping[str, Any] | None = None) -> Span | None:
    """Record an exception that the agent met and dealt with, with its traceback."""
    if not isinstance(exception, BaseException):
        raise KindError(f"emit_exception takes an exception, not {type(exception).__name__}.")
    trace = trace_for("emit_exception")
    if trace is None:
        return None
    found: Attributes = {**plain(attributes), **exception_attributes(exception)}
    return record(trace, EXCEPTION, found, error_status(exception))


@explained
def emit_annotation(attributes: Mapping[str, Any]) -> Span | None:
    """Attach attributes to the attempt. Nested dicts become dotted keys."""
    trace = trace_for("emit_annotation")
    return None if trace is None else record(trace, ANNOTATION, plain(attributes))
