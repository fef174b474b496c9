"""Tracers on top of other packages: their spans land in the right rollout and name the calls that they are about."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import pytest

from agentlightning.gateway.records import CALL_ID
from agentlightning.tracer import AgentOpsTracer, Tracer, WeaveTracer
from agentlightning.types import Outcome
from tests.clients.conftest import World
from tests.clients.test_clients import TASKS, check_attribution, load

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]


def agent_framework_tracer() -> Tracer:
    """The real package's own class, which derives from ours."""
    return importlib.import_module("agent_framework.lab.lightning").AgentFrameworkTracer()


CASES: dict[str, tuple[str, Callable[[], Tracer], str, set[str]]] = {
    "agentops": ("openai_chat", AgentOpsTracer, "openai.chat.completion", set()),
    "agent-framework-lab": (
        "agent_framework_chat",
        agent_framework_tracer,
        "chat ",
        {"invoke_agent solver", "execute_tool calc"},
    ),
    "weave": ("openai_chat", WeaveTracer, "openai.chat.completions.create", set()),
}
"""By package: an agent, its tracer, what the spans of model calls begin with, and further spans that every run has."""


@pytest.mark.parametrize("package", CASES)
async def test_spans_of_a_tracer(world: World, package: str) -> None:
    try:
        version(package)
    except PackageNotFoundError:
        pytest.skip(f"not installed here: {package}")
    name, make, prefix, wanted = CASES[package]
    agent, tracer = load(name), make()
    try:
        run = await world.run(agent.solve, False, TASKS, scripted=agent.SCRIPTED, tracer=tracer)
    finally:
        tracer.teardown()
    assert {r.attempt.outcome for r in run.rollouts} <= {Outcome.OK, Outcome.TRUNCATED}
    check_attribution(run)
    for rollout in run.rollouts:
        spans = run.spans[rollout.rollout_id]
        calls = {call.info.response_id for call in run.calls[rollout.rollout_id]}
        theirs = [s for s in spans if s.name.startswith(prefix) and CALL_ID not in s.attributes]
        seen = [str(span.attributes.get("gen_ai.response.id")) for span in theirs]
        assert sorted(seen) == sorted(calls), "a span for each call, and none of another rollout's"
        assert wanted <= {span.name for span in spans}
