"""Tool outcomes: spans → what became of each tool call, and which model call had asked for it. Pure.

A tool call is known by the model call that made it (the gateway's span). What became of it is known by the result that
the next model call was given, by a tool span of an instrumented framework (GenAI conventions, OpenInference, AgentOps),
or by both; a span that says ERROR wins.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentlightning.adapter.numbered import messages_in, read_json
from agentlightning.types import Span
from agentlightning.types.names import OPERATION, OPERATION_NAME, OPERATION_OUTPUT


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """One tool call that was carried out."""

    name: str
    arguments: str | None
    """JSON text as the model wrote it."""
    output: str | None
    error: str | None
    """What went wrong; None if nothing did."""
    response_id: str | None
    """The response that asked for it; None if no model call did."""
    call_id: str | None
    """The tool call's own id."""


@dataclass(slots=True)
class _ToolCall:
    """A tool call that a model made."""

    id: str | None
    name: str
    arguments: str | None
    response_id: str | None
    time: float
    done: bool = False
    """A model call was given its result."""
    spanned: bool = False
    """A tool span carried it out."""


def tool_outcomes(spans: Sequence[Span]) -> list[ToolOutcome]:
    """The tool calls that were carried out, in the order in which the model asked for them; unasked ones last."""
    requests = [a for span in _by_time(spans) for a in _tool_calls(span)]
    found: dict[int, ToolOutcome] = {}
    for span in _by_time(spans):
        for call_id, output in _results(span):
            index = next((i for i, a in enumerate(requests) if a.id == call_id and not a.done), None)
            if index is not None:
                requests[index].done = True
                a = requests[index]
                found[index] = ToolOutcome(a.name, a.arguments, output, _error_in(output), a.response_id, a.id)
    unrequested: list[ToolOutcome] = []
    for span in _by_time(spans):
        outcome = _of_tool_span(span)
        if outcome is None:
            continue
        index = _request_of(requests, found, outcome, span)
        if index is None:
            if span.name != OPERATION:  # an operation is a tool only if a model asked for it
                unrequested.append(outcome)
            continue
        known = found.get(index)
        a = requests[index]
        merged = replace(outcome, arguments=a.arguments, response_id=a.response_id, call_id=a.id)
        found[index] = merged if known is None or outcome.error else known
        a.spanned = True
    return [found[i] for i in sorted(found)] + unrequested


def _by_time(spans: Sequence[Span]) -> list[Span]:
    return sorted(spans, key=lambda s: s.start_time or 0.0)


def _tool_calls(span: Span) -> Iterator[_ToolCall]:
    for part in _parts(span, "gen_ai.output.messages", "tool_call"):
        yield _ToolCall(
            id=part.get("id"),
            name=str(part.get("name", "")),
            arguments=_text(part.get("arguments")),
            response_id=span.attributes.get("gen_ai.response.id"),
            time=span.end_time or 0.0,
        )


def _results(span: Span) -> Iterator[tuple[str | None, str | None]]:
    for part in _parts(span, "gen_ai.input.messages", "tool_call_response"):
        yield part.get("id"), _text(part.get("response", part.get("result")))


def _parts(span: Span, attribute: str, kind: str) -> Iterator[dict[str, Any]]:
    """The parts of one kind in the messages of a span by the GenAI conventions."""
    parts = (part for message in messages_in(span.attributes.get(attribute)) for part in message["parts"])
    yield from (part for part in parts if part["type"] == kind)


def _of_tool_span(span: Span) -> ToolOutcome | None:
    """What a tool's own span says; None for other spans."""
    a = span.attributes
    if a.get("gen_ai.operation.name") == "execute_tool":
        name, output = a.get("gen_ai.tool.name", span.name), a.get("gen_ai.tool.call.result")
    elif a.get("openinference.span.kind") == "TOOL":
        name, output = a.get("tool.name", span.name), a.get("output.value")
    elif a.get("agentops.span.kind") == "tool" and "tool.call.id" in a and "agentops.entity.output" not in a:
        return None  # AgentOps' way to say that a model asked for it
    elif a.get("agentops.span.kind") == "tool":
        name, output = a.get("tool.name", a.get("operation.name", span.name)), a.get("agentops.entity.output")
    elif span.name == OPERATION:
        name, output = a.get(OPERATION_NAME, ""), a.get(OPERATION_OUTPUT)
    else:
        return None
    failed = span.status.status_code == "ERROR"
    text = _text(output)
    error = (span.status.description or text or "failed") if failed else _error_in(text)
    return ToolOutcome(str(name), None, text, error, None, a.get("gen_ai.tool.call.id"))


def _request_of(
    requests: Sequence[_ToolCall], found: dict[int, ToolOutcome], outcome: ToolOutcome, span: Span
) -> int | None:
    """The tool call that this span carried out: by its id; else one of its name that has no span yet, best the one
    with the same output."""
    began = (span.start_time or 0.0) + 1e-3
    for i, a in enumerate(requests):
        if outcome.call_id is not None and a.id == outcome.call_id:
            return i
    free = [i for i, a in enumerate(requests) if a.name == outcome.name and a.time <= began and not a.spanned]
    return next((i for i in free if i in found and found[i].output == outcome.output), free[0] if free else None)


def _error_in(output: str | None) -> str | None:
    """What a tool's result says went wrong: JSON with an "error" or "isError", or text that begins with it."""
    if output is None:
        return None
    text = output.strip()
    if text[:1] == "{":
        given = read_json(text, {})
        if given.get("isError") or given.get("is_error"):
            return text
        return str(given["error"]) if given.get("error") else None
    lowered = text.lower()
    return text if lowered.startswith(("error", "exception", "traceback (most recent call last)")) else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)
