"""Agents' names, with stand-ins for the frameworks that keep them where the real packages do (see `tests/clients`)."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from agentlightning.tracer import DummyTracer, GatewayAccess, instrument, uninstrument
from agentlightning.tracer.otel import framework_agent_name

RUNS = """
class Agent:
    def __init__(self, name, inner=None):
        self.name, self.inner = name, inner

    def run(self, ask):
        return self.inner.run(ask) if self.inner else ask()
"""


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, code: str = "", **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name.partition(".")[0], module)
    monkeypatch.setitem(sys.modules, name, module)
    exec(code, vars(module))
    return module


def test_the_innermost_agent_whose_method_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = stand_in(monkeypatch, "smolagents.agents", RUNS)
    assert framework_agent_name() is None
    manager = agents.Agent("manager", agents.Agent("writer"))
    assert manager.run(framework_agent_name) == "writer"
    assert agents.Agent("manager", agents.Agent(None)).run(framework_agent_name) == "manager"
    assert agents.Agent(None).run(framework_agent_name) is None


def test_the_innermost_agent_that_a_function_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = stand_in(monkeypatch, "agno.agent._run", "def run(agent, ask): return ask()")
    writer, manager, unnamed = (SimpleNamespace(name=name) for name in ("writer", "manager", None))
    assert runs.run(manager, lambda: runs.run(writer, framework_agent_name)) == "writer"
    assert runs.run(manager, lambda: runs.run(unnamed, framework_agent_name)) == "manager"


def test_methods_of_other_modules_are_no_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    agents = stand_in(monkeypatch, "smolagents.agents_of_mine", RUNS)
    assert agents.Agent("writer").run(framework_agent_name) is None


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"lc_agent_name": "writer", "langgraph_checkpoint_ns": "model:1"}, "writer"),
        ({"langgraph_checkpoint_ns": "write_query:1"}, "write_query"),
        ({"langgraph_checkpoint_ns": "research:1|model:2"}, "research"),
        ({"langgraph_checkpoint_ns": "model:2"}, "model"),
        ({}, ""),
    ],
)
def test_langgraphs_nodes_and_names(monkeypatch: pytest.MonkeyPatch, metadata: dict[str, str], name: str) -> None:
    config: ContextVar[Any] = ContextVar("config")
    config.set({"metadata": metadata})
    stand_in(monkeypatch, "langchain_core.runnables.config", var_child_runnable_config=config)
    assert (framework_agent_name() or "") == name


def test_openais_agents_are_the_span_around(monkeypatch: pytest.MonkeyPatch) -> None:
    current: ContextVar[Any] = ContextVar("current", default=None)
    scope = SimpleNamespace(get_current_span=current.get)
    stand_in(monkeypatch, "agents.tracing.scope", Scope=scope)
    assert framework_agent_name() is None
    for kind, name in (("agent", "outer"), ("agent", "writer"), ("function", "search")):
        span = SimpleNamespace(span_data=SimpleNamespace(type=kind, name=name))
        span._prev_span_token = current.set(span)
    assert framework_agent_name() == "writer"


DSPYS = """
class Module:
    def __init__(self, **parts):
        vars(self).update(parts)

    def named_sub_modules(self):
        yield "self", self
        for name, part in vars(self).items():
            yield f"self.{name}", part
            yield from ((f"self.{name}.{inner}", p) for inner, p in vars(part).items())

class ReAct(Module): pass
class Predict(Module): pass
"""


def test_dspys_modules_by_the_attribute_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = stand_in(monkeypatch, "dspy.predict", DSPYS)
    settings = SimpleNamespace(caller_modules=None)
    stand_in(monkeypatch, "dspy.dsp.utils.settings", settings=settings)
    assert framework_agent_name() is None

    class Team(modules.Module): ...

    predict = modules.Predict()
    react = modules.ReAct(react=predict)
    office, team = Team(writer=react), Team(predict=predict)
    for running, name in (
        ([react, predict], "ReAct"),
        ([team, predict], "Team.predict"),
        ([office, react, predict], "Team.writer"),
        ([Team(office=office), office, react, predict], "Team.office.writer"),
        ([team, modules.Predict()], "Team.Predict"),
    ):
        settings.caller_modules = running
        assert framework_agent_name() == name


SENT = """
from dataclasses import dataclass

@dataclass
class Request:
    url: str
    headers: list

class StdlibTransport:
    def stream(self, request):
        return request

class StdlibAsyncTransport:
    pass
"""


async def test_what_dspy_sends_is_attributed(monkeypatch: pytest.MonkeyPatch) -> None:
    instrument(lambda: "writer")
    sent = stand_in(monkeypatch, "dspy._vendor.lm15.transports", SENT)
    try:
        instrument(lambda: "writer")  # as before every attempt: it has been loaded since
        async with DummyTracer().trace_context(rollout_id="r", attempt_id="a") as trace:
            trace.access = GatewayAccess("http://127.0.0.1:1/rollout/r/attempt/a/v1", "agl-key")
            url = "http://127.0.0.1:1/v1/chat/completions?x=1"
            request = sent.Request(url, [("Authorization", "Bearer dummy"), ("X-Mine", "1")])
            done = sent.StdlibTransport().stream(request)
            other = sent.Request("http://other/v1/models", [])
            assert sent.StdlibTransport().stream(other) is other
    finally:
        uninstrument()
    assert done.url == "http://127.0.0.1:1/rollout/r/attempt/a/v1/chat/completions?x=1"
    assert dict(done.headers) == {
        "X-Mine": "1",
        "authorization": "Bearer agl-key",
        "x-agl-attempt": "r/a",
        "baggage": "agentlightning.agent=writer",
    }
    assert request.url == url, "what the agent has is not changed"


def test_another_version_of_a_framework_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("agents.tracing.scope", "langchain_core.runnables.config", "pydantic_ai._run_context"):
        stand_in(monkeypatch, name)
    stand_in(monkeypatch, "workflows.runtime.types.results", StepWorkerStateContextVar=ContextVar("step"))
    assert framework_agent_name() is None
