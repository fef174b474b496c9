"""The client that weave's operations report to, in place of the one that talks to a server. Needs the package weave."""

# An optional package, which the checks run without.
# pyright: reportMissingImports=false

from __future__ import annotations

import datetime
import json
from typing import Any

from opentelemetry import context as otel_context, trace as otel_trace
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation import set_span_in_context
from weave.trace.call import Call
from weave.trace.context import call_context
from weave.trace.weave_client import WeaveClient

from agentlightning.types.names import AGENT_NAME

OP_NAME = "weave.op_name"
INPUTS = "weave.inputs"
OUTPUT = "weave.output"


class SpanClient(WeaveClient):
    """Makes a span of every call, in the context of who calls. Overrides all that would talk to a server."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}
        self._spans: dict[str, otel_trace.Span] = {}

    def create_call(
        self,
        op: Any,
        inputs: dict[str, Any],
        parent: Call | None = None,
        attributes: dict[str, Any] | None = None,
        display_name: Any = None,
        *,
        use_stack: bool = True,
        _call_id_override: str | None = None,
        started_at: datetime.datetime | None = None,
    ) -> Call:
        name = op if isinstance(op, str) else op.name
        parent = parent or (call_context.get_current_call() if use_stack else None)
        around = None if parent is None or parent.id is None else self._spans.get(parent.id)
        context = otel_context.get_current() if around is None else set_span_in_context(around)
        span = otel_trace.get_tracer("weave").start_span(name, context, attributes=_given(name, inputs, attributes))
        call_id = _call_id_override or f"{span.get_span_context().span_id:016x}"
        self._spans[call_id] = span
        call = Call(
            _op_name=name,
            trace_id=f"{span.get_span_context().trace_id:032x}",
            project_id="local",
            parent_id=None if parent is None else parent.id,
            inputs=inputs,
            id=call_id,
            attributes=attributes,
            started_at=started_at or datetime.datetime.now(tz=datetime.UTC),
        )
        call.display_name = display_name(call) if callable(display_name) else display_name
        if use_stack:
            call_context.push_call(call)
        return call

    def finish_call(
        self,
        call: Call,
        output: Any = None,
        exception: BaseException | None = None,
        *,
        op: Any = None,
        ended_at: datetime.datetime | None = None,
    ) -> None:
        call.output, call.ended_at = output, ended_at or datetime.datetime.now(tz=datetime.UTC)
        call_context.pop_call(call.id)
        span = self._spans.pop(call.id or "", None)
        if span is None:
            return
        if exception is not None:
            call.exception = f"{type(exception).__name__}: {exception}"
            span.record_exception(exception)
            span.set_status(Status(StatusCode.ERROR, call.exception))
        else:
            span.set_attributes(_produced(output))
        span.end()

    def flush(self, *_: Any, **__: Any) -> None:
        """Nothing waits."""


def _given(name: str, inputs: dict[str, Any], attributes: dict[str, Any] | None) -> dict[str, Any]:
    """The attributes a call begins with."""
    # A method's own object may hold keys, and says little.
    found = {OP_NAME: name, INPUTS: _json({k: v for k, v in inputs.items() if k != "self"})}
    found |= {f"weave.attributes.{k}": v for k, v in (attributes or {}).items() if isinstance(v, str | int | float)}
    if (attributes or {}).get("kind") == "agent":
        found[AGENT_NAME] = name
    return found


def _produced(output: Any) -> dict[str, Any]:
    """The attributes of what a call gave; a model's answer is known by its id."""
    found = {OUTPUT: _json(output)}
    answer = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    if isinstance(answer.get("id"), str) and answer.get("model"):
        found |= {"gen_ai.response.id": answer["id"], "gen_ai.response.model": str(answer["model"])}
    return found


def _json(value: Any) -> str:
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)
    return dump(mode="json") if callable(dump) else repr(value)
