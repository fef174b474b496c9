"""The name of the agent whose code is running, as its framework knows it, where no OpenTelemetry span says one.

Each framework is asked in its own way: by the context that it keeps, or by the object whose method is running. One that
is not loaded is not asked, and none is loaded here. A version that keeps it elsewhere gives no name and breaks nothing.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextvars import Token
from itertools import pairwise
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)


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
    """The agent that the event names which the workflow's step works on."""
    step = results.StepWorkerStateContextVar.get(None)
    return getattr(getattr(step, "event", None), "current_agent_name", None)


def _pydantic_ai(runs: Any) -> Any:
    """The agent of the run."""
    run = runs.get_current_run_context()
    return None if run is None or run.agent is None else run.agent.name


def _dspy(module: Any) -> Any:
    """The class of the outermost module, and the attribute under which it has the one that is running: `Team.writer`.

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
"""The module that has the context, and who reads it."""

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
"""Modules (or packages) whose functions run agents, and where such an agent has its name, from a local variable on."""
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
