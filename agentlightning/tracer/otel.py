"""Collects all spans that any library records with OpenTelemetry's global provider, each in the trace of its attempt.

Hundreds of attempts may run in one process: one span processor, installed once per provider, routes every span by the
context it started in. A span belongs to, in this order: the attempt that made its OpenTelemetry trace id, the attempt
that is current where it starts, the attempt of its parent span.

Where no OpenTelemetry span names the agent whose code is running, its framework is asked, each in its own way: by the
context that it keeps, or by the object whose method is running. A framework that is not loaded is not asked, and none
is loaded here. A version that keeps the name elsewhere gives none and breaks nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from contextvars import Token
from itertools import pairwise
from types import FrameType
from typing import Any

from opentelemetry import context as otel_context, trace as otel_trace
from opentelemetry.sdk.trace import ReadableSpan, Span as SdkSpan, SpanProcessor, TracerProvider

from agentlightning.arguments import explained_class
from agentlightning.tracer.base import FLUSH_SECONDS, Tracer
from agentlightning.tracer.trace import Trace, current_trace
from agentlightning.types import Span
from agentlightning.types.names import AGENT_NAME, EXECUTOR_ID

logger = logging.getLogger(__name__)


class SpanRouter(SpanProcessor):
    """Brings each ended span to the trace it belongs to; spans of no attempt are ignored."""

    def __init__(self) -> None:
        self._traces: dict[int, Trace] = {}
        """Open traces by their OpenTelemetry trace id."""
        self._owners: dict[int, tuple[Trace, ReadableSpan]] = {}
        """Spans that have not ended, by span id."""

    def open(self, trace: Trace) -> None:
        self._traces[int(trace.trace_id, 16)] = trace

    def close(self, trace: Trace) -> None:
        """Forget the trace. Its spans that have not ended are recorded as they are, without an end time."""
        self._traces.pop(int(trace.trace_id, 16), None)
        # A copy, because threads of other attempts start and end spans meanwhile.
        for span_id, (owner, span) in self._owners.copy().items():
            if owner is trace and self._owners.pop(span_id, None):
                trace.add(_record(span, trace))

    def on_start(self, span: SdkSpan, parent_context: otel_context.Context | None = None) -> None:
        context = span.get_span_context()
        if context is None:
            return
        trace = self._traces.get(context.trace_id) or self._current()
        if trace is None and span.parent is not None and (known := self._owners.get(span.parent.span_id)):
            trace = known[0]
        if trace is not None:
            self._owners[context.span_id] = (trace, span)

    def _current(self) -> Trace | None:
        """The trace of the attempt this code runs in, if it is open and wants the spans of libraries."""
        trace = current_trace()
        return None if trace is None else self._traces.get(int(trace.trace_id, 16))

    def parent_of(self, span: ReadableSpan) -> ReadableSpan | None:
        """The span around a span, while both are open."""
        known = None if span.parent is None else self._owners.get(span.parent.span_id)
        return None if known is None else known[1]

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        known = None if context is None else self._owners.pop(context.span_id, None)
        if known is not None:
            known[0].add(_record(span, known[0]))


def _record(span: ReadableSpan, trace: Trace) -> Span:
    record = Span.from_opentelemetry(span, trace.rollout_id, trace.attempt_id)
    if record.parent_id != trace.root_id:
        return record
    return record.model_copy(update={"parent_id": None, "parent": None})


_router = SpanRouter()
_routed: weakref.WeakSet[TracerProvider] = weakref.WeakSet()


def route_spans_of(provider: TracerProvider) -> None:
    """Bring the spans of this provider to the traces of their attempts. Once is enough; repeating changes nothing."""
    if provider not in _routed:
        provider.add_span_processor(_router)
        _routed.add(provider)


def current_agent_name() -> str | None:
    """The agent whose code is running: the id of the workflow's step around it, else the name on the innermost open
    span that carries one, else the name that its framework knows.
    """
    current = otel_trace.get_current_span()
    span = current if isinstance(current, ReadableSpan) else None
    name = None
    while span is not None:
        attributes = span.attributes or {}
        if attributes.get(EXECUTOR_ID):
            return str(attributes[EXECUTOR_ID])
        name = name or attributes.get(AGENT_NAME)
        span = _router.parent_of(span)
    return framework_agent_name() if name is None else str(name)


@explained_class
class OtelTracer(Tracer):
    """Collects the spans of the process's global OpenTelemetry provider, and sets one up if there is none.

    An application with a provider of its own sets it before the first trace. Spans of a provider that is not the
    global one are collected after `route_spans_of(provider)`.
    """

    def __init__(self, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        super().__init__(flush_seconds=flush_seconds)
        self._warned = False

    def init(self) -> None:
        super().init()
        provider = otel_trace.get_tracer_provider()
        if isinstance(provider, otel_trace.ProxyTracerProvider):  # nobody has set one yet
            provider = TracerProvider()
            otel_trace.set_tracer_provider(provider)
        if isinstance(provider, TracerProvider):
            route_spans_of(provider)
        if not self._warned and (why := _why_blind(provider)):
            self._warned = True
            logger.warning("Spans of instrumented libraries are not recorded: %s", why)

    def _open(self, trace: Trace) -> None:
        self.init()
        _router.open(trace)

    def _close(self, trace: Trace) -> None:
        _router.close(trace)


def _why_blind(provider: otel_trace.TracerProvider) -> str | None:
    """The reason why no spans will come from the provider, None if they will."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return "OTEL_SDK_DISABLED is set in the environment. Unset it to see them."
    if not isinstance(provider, TracerProvider):
        return f"the global provider is {type(provider).__name__}, not the OpenTelemetry SDK's. Do not set another one."
    return None


def framework_agent_name() -> str | None:
    """The name of the innermost agent around the caller that a loaded framework knows; None if none does."""
    for module, read in _CONTEXTS.items():
        if (loaded := sys.modules.get(module)) is not None and (name := _name_in(module, read, loaded)):
            return name
    return _running(sys._getframe(1)) if any(name in sys.modules for name in _PACKAGES) else None


def _name_in(module: str, read: Callable[[Any], Any], loaded: Any) -> str | None:
    try:
        name = read(loaded)
    except (AttributeError, LookupError, TypeError) as error:  # what is read is private to the framework in part
        logger.debug("%s does not say which agent is running: %r", module, error)
        return None
    return name if isinstance(name, str) else None


# ---- frameworks that keep the agent in a context ---------------------------------------------------------------------


def _openai_agents(scope: Any) -> Any:
    """The agent's span. Spans are in the context even where tracing is off; each remembers the one before it."""
    span = scope.Scope.get_current_span()
    while span is not None and span.span_data.type != "agent":
        token = span._prev_span_token
        span = None if token is None or token.old_value is Token.MISSING else token.old_value
    return None if span is None else span.span_data.name


_PREBUILT = ("model", "agent", "tools")
"""Nodes of the graphs that LangChain builds for an agent: the node around such a graph says more."""


def _langgraph(config: Any) -> Any:
    """The name that LangChain's agent was given, else the graph's node."""
    metadata = (config.var_child_runnable_config.get() or {}).get("metadata") or {}
    if named := metadata.get("lc_agent_name"):
        return named
    space = metadata.get("langgraph_checkpoint_ns") or ""
    nodes = [part.partition(":")[0] for part in space.split("|")]
    return next((node for node in reversed(nodes) if node not in _PREBUILT), nodes[-1])


def _llama_index(results: Any) -> Any:
    """The agent named by the event that the workflow's step works on."""
    step = results.StepWorkerStateContextVar.get(None)
    return getattr(getattr(step, "event", None), "current_agent_name", None)


def _pydantic_ai(runs: Any) -> Any:
    """The agent of the run."""
    run = runs.get_current_run_context()
    return None if run is None or run.agent is None else run.agent.name


def _dspy(module: Any) -> Any:
    """The class of the outermost module, and the attribute that holds the module which is running: `Team.writer`.

    The path ends where DSPy's own modules begin: what those are made of are no agents.
    """
    running = module.settings.caller_modules or ()
    if not running:
        return None
    path = [type(running[0]).__name__]
    for owner, inner in pairwise(running):
        if type(owner).__module__.startswith("dspy."):
            break
        inside = (name for name, part in owner.named_sub_modules() if part is inner)
        path.append(next(inside, type(inner).__name__).removeprefix("self."))
    return ".".join(path)


_CONTEXTS: dict[str, Callable[[Any], Any]] = {
    "agents.tracing.scope": _openai_agents,
    "dspy.dsp.utils.settings": _dspy,
    "langchain_core.runnables.config": _langgraph,
    "workflows.runtime.types.results": _llama_index,
    "pydantic_ai._run_context": _pydantic_ai,
}
"""The modules that have the context, each with the function that reads it."""

# ---- frameworks whose agents are objects -----------------------------------------------------------------------------

_OBJECTS = {
    "ag2.agent": "self.name",
    "agent_framework._agents": "self.name",
    "agentscope.agent": "self.name",
    "agno.agent._run": "agent.name",
    "autogen.agentchat": "self.name",
    "autogen_agentchat.agents": "self.name",
    "crewai.agent.core": "self.role",
    "crewai.agents": "self.agent.role",
    "pydantic_ai.agent": "self.name",
    "smolagents.agents": "self.name",
}
"""Modules (or packages) whose functions run agents, and the path to an agent's name, from a local variable on."""
_PACKAGES = {module.partition(".")[0] for module in _OBJECTS}


def _running(frame: FrameType | None) -> str | None:
    """The name of the agent that a function of its framework is running, the innermost if there are several."""
    while frame is not None:
        where = frame.f_globals.get("__name__") or ""
        path = next((path for module, path in _OBJECTS.items() if f"{where}.".startswith(f"{module}.")), None)
        if path is not None and (name := _found(frame.f_locals, path)):
            return name
        frame = frame.f_back
    return None


def _found(variables: Mapping[str, Any], path: str) -> str | None:
    variable, *attributes = path.split(".")
    owner = variables.get(variable)
    for attribute in attributes:
        owner = getattr(owner, attribute, None)
    return owner if isinstance(owner, str) else None
