"""A call as a span for people and adapters, by OpenTelemetry's GenAI conventions. Pure.

Messages have the conventions' shape: `[{"role": …, "parts": [{"type": "text", "content": …}, …]}]`, as JSON text. Input
messages are only those since the call that is continued; the tool definitions are on the first call of a history. Both
are with the first choice of a response only; the others name its call.

Calls that another provider answered are read from the bodies that went through, so that they, too, can be read as
conversations and joined with the spans of frameworks. What cannot be read (an image, a body that was cut off, fields of
the provider's own) is left out; the span keeps the bodies as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects import Dialect
from agentlightning.gateway.exchange import Refusal
from agentlightning.rendering.messages import Message, Tool
from agentlightning.types import Attributes, CallInfo, OtelResource, Span, SpanStatus
from agentlightning.types.call import LeftOut
from agentlightning.types.names import CALL_ID, CHAT, EMBEDDINGS, LEFT_OUT, PARENT_CALL_ID, SAME_INPUT

REMEMBERS_FROM = "agentlightning.remembers_from"
"""On calls that a later stateful request may refer to: the index of the first message that is then taken over."""

ARGUMENTS = "agentlightning.template_arguments"
"""On the first call of a history: what its requests give to the chat template, as JSON."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where in a trace a call belongs, and who made it; from the request's headers."""

    trace_id: str
    parent_span_id: str | None = None
    agent: str | None = None
    judge: bool = False
    """Whether the call grades somebody's work: recorded, never trained."""


class Forwarded(msgspec.Struct, frozen=True, kw_only=True):
    """A call that another provider answers."""

    call_id: str
    alias: str
    dialect: str
    request: str
    """The body, as JSON text."""
    start: float


def span_id_of(call_id: str) -> str:
    """A call's span id: the same whenever the record is made again."""
    return hashlib.blake2b(call_id.encode(), digest_size=8).hexdigest()


def trace_id_of(rollout_id: str, attempt_id: str) -> str:
    """The trace of an attempt's calls when the client sends none."""
    return hashlib.blake2b(f"{rollout_id}/{attempt_id}".encode(), digest_size=16).hexdigest()


def call_span(
    info: CallInfo,
    place: Place,
    *,
    input_messages: Sequence[Message],
    output: Message | None,
    same_input_as: str | None,
    tools: Sequence[Tool] | None,
    arguments: Mapping[str, Any],
    prompt_tokens: int,
    response_tokens: int,
    remembers_from: int | None,
    left_out: Sequence[LeftOut] = (),
) -> Span:
    """The span of a call, failed ones included (`info.error`)."""
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "agentlightning",
        "gen_ai.request.model": info.model,
        "gen_ai.response.id": info.response_id,
        "gen_ai.response.model": info.policy,
        "gen_ai.response.finish_reasons": [info.finish_reason],
        "gen_ai.usage.input_tokens": prompt_tokens,
        "gen_ai.usage.output_tokens": response_tokens,
        CALL_ID: info.call_id,
        **{_REQUEST[k]: list(v) if isinstance(v, tuple) else v for k, v in info.used.items() if k in _REQUEST},
    }
    if info.parent_call_id is not None:
        attributes[PARENT_CALL_ID] = info.parent_call_id
    if input_messages:
        attributes["gen_ai.input.messages"] = _json([_parts(m) for m in input_messages])
    if same_input_as is not None:
        attributes[SAME_INPUT] = same_input_as
    if output is not None:
        attributes["gen_ai.output.messages"] = _json([{**_parts(output), "finish_reason": info.finish_reason}])
    if tools:
        attributes["gen_ai.tool.definitions"] = _json(tools)
    if arguments:
        attributes[ARGUMENTS] = _json(arguments)
    if remembers_from is not None:
        attributes[REMEMBERS_FROM] = remembers_from
    if left_out:
        attributes[LEFT_OUT] = _json(left_out)
    if info.agent is not None:
        attributes["gen_ai.agent.name"] = info.agent
    return _span(info.rollout_id, info.attempt_id, place, info.call_id, f"chat {info.model}", attributes, info)


def refusal_span(
    rollout_id: str, attempt_id: str, place: Place, call_id: str, model: str, error: str, start: float, end: float
) -> Span:
    """The span of a request that was refused before anything was sampled."""
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": model,
        CALL_ID: call_id,
        "error.type": "refused",
    }
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trace_id=place.trace_id,
        span_id=span_id_of(call_id),
        parent_id=place.parent_span_id,
        name=f"chat {model}",
        status=SpanStatus(status_code="ERROR", description=error),
        attributes=attributes,
        start_time=start,
        end_time=end,
        resource=_resource(rollout_id, attempt_id),
    )


def forwarded_span(
    rollout_id: str,
    attempt_id: str,
    place: Place,
    call: Forwarded,
    response: bytes,
    forwarded: ForwardedMessages,
    end: float,
    error: str | None,
) -> Span:
    """The span of a call that another provider answered: both bodies as they were, and what could be read in them."""
    operation = EMBEDDINGS if call.dialect == EMBEDDINGS else CHAT
    attributes: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": call.alias,
        "gen_ai.request.model": call.alias,
        **({CALL_ID: call.call_id} if operation == CHAT else {}),  # what has one is read as a conversation
        "agentlightning.trained": False,
        "agentlightning.dialect": call.dialect,
        "agentlightning.request": call.request,
        "agentlightning.response": response.decode("utf-8", "replace"),
        **_answer_attributes(forwarded.answer),
    }
    if forwarded.messages:
        attributes["gen_ai.input.messages"] = _json([_parts(m) for m in forwarded.messages])
    if forwarded.answer_message is not None:
        attributes["gen_ai.output.messages"] = _json([_parts(forwarded.answer_message)])
    if forwarded.tools:
        attributes["gen_ai.tool.definitions"] = _json(forwarded.tools)
    if place.agent is not None:
        attributes["gen_ai.agent.name"] = place.agent
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trace_id=place.trace_id,
        span_id=span_id_of(call.call_id),
        parent_id=place.parent_span_id,
        name=f"{operation} {call.alias}",
        status=SpanStatus(status_code="OK") if error is None else SpanStatus(status_code="ERROR", description=error),
        attributes=attributes,
        start_time=call.start,
        end_time=end,
        resource=_resource(rollout_id, attempt_id),
    )


def _answer_attributes(answer: Mapping[str, Any]) -> Attributes:
    """What a provider's answer says about itself."""
    usage: Any = answer.get("usage")
    if not isinstance(usage, dict):
        usage = {}
    ids = _token_ids(answer)
    found = {
        **({"prompt_token_ids": ids[0], "response_token_ids": ids[1]} if ids else {}),
        "gen_ai.response.id": answer.get("id"),
        "gen_ai.response.model": answer.get("model"),
        "gen_ai.usage.input_tokens": usage.get("prompt_tokens", usage.get("input_tokens")),
        "gen_ai.usage.output_tokens": usage.get("completion_tokens", usage.get("output_tokens")),
    }
    return {name: value for name, value in found.items() if value is not None}


def _token_ids(answer: Mapping[str, Any]) -> tuple[list[int], list[int]] | None:
    """The token ids of prompt and response, if the provider gives both, as vLLM does when it is asked to."""
    choices: Any = answer.get("choices") or [{}]
    prompt, response = answer.get("prompt_token_ids"), choices[0].get("token_ids")
    return (prompt, response) if isinstance(prompt, list) and isinstance(response, list) and response else None


_REQUEST = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "max_tokens": "gen_ai.request.max_tokens",
    "stop": "gen_ai.request.stop_sequences",
    "seed": "gen_ai.request.seed",
}


def _span(
    rollout_id: str, attempt_id: str, place: Place, call_id: str, name: str, attributes: Attributes, info: CallInfo
) -> Span:
    status = SpanStatus(status_code="OK")
    if info.error is not None:
        status = SpanStatus(status_code="ERROR", description=info.error)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        trace_id=place.trace_id,
        span_id=span_id_of(call_id),
        parent_id=place.parent_span_id,
        name=name,
        status=status,
        attributes=attributes,
        start_time=info.start_time,
        end_time=info.end_time,
        resource=_resource(rollout_id, attempt_id),
    )


def _resource(rollout_id: str, attempt_id: str) -> OtelResource:
    return OtelResource(
        attributes={
            "service.name": "agentlightning-gateway",
            "agentlightning.rollout_id": rollout_id,
            "agentlightning.attempt_id": attempt_id,
        }
    )


def _parts(message: Message) -> dict[str, Any]:
    """A neutral message in the shape of the GenAI conventions."""
    parts: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if message["role"] == "tool":
        parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message["content"]})
    elif message["content"]:
        parts.append({"type": "text", "content": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        parts.append(
            {"type": "tool_call", "id": call["id"], "name": function["name"], "arguments": function["arguments"]}
        )
    return {"role": message["role"], "parts": parts}


def message_of(shaped: dict[str, Any]) -> Message:
    """The neutral message of this shape: undoes `_parts`."""
    message: Message = {"role": shaped["role"], "content": ""}
    calls = []
    for part in shaped["parts"]:
        match part["type"]:
            case "reasoning":
                message["reasoning_content"] = part["content"]
            case "text":
                message["content"] = part["content"]
            case "tool_call_response":
                message["content"] = part["response"]
                if part["id"] is not None:
                    message["tool_call_id"] = part["id"]
            case _:
                function = {"name": part["name"], "arguments": part["arguments"]}
                calls.append({"id": part["id"], "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_Body = dict[str, Any]


class ForwardedMessages(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation of a forwarded call, as far as it can be read."""

    messages: Sequence[Message] = ()
    tools: Sequence[Tool] | None = None
    answer_message: Message | None = None
    answer: Mapping[str, Any] = {}
    """The provider's answer as one object, also if it was streamed."""


def read_forwarded(dialect: Dialect, request: Mapping[str, Any], answer: _Body) -> ForwardedMessages:
    """Read a request and its answer."""
    core = {name: request[name] for name in dialect.conversation_fields if name in request}
    try:
        if not core or request.get("previous_response_id"):  # the provider knows more of the conversation
            return ForwardedMessages(answer=answer)
        parsed = dialect.parse({"model": "any", **core}, {})
        answer_message = dialect.answer_message(answer) if answer else None
    except (Refusal, LookupError, TypeError, ValueError, AttributeError):
        return ForwardedMessages(answer=answer)
    return ForwardedMessages(messages=parsed.messages, tools=parsed.tools, answer_message=answer_message, answer=answer)


def answer_in(dialect: Dialect, response: bytes) -> _Body:
    """The bytes of an answer as one object; empty if they are no JSON."""
    found = _parsed(response)
    try:
        if not isinstance(found, dict):
            found = dialect.gather(_events(response) if found is None else found)
        return dialect.in_openai_terms(found)
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _events(response: bytes) -> list[_Body]:
    """The objects of a stream of server-sent events."""
    lines = [line[5:].strip() for line in response.split(b"\n") if line.startswith(b"data:")]
    return [event for event in map(_parsed, lines) if isinstance(event, dict)]


def _parsed(text: bytes) -> Any:
    """The value of a JSON text; None for anything else."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
