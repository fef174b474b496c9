"""Tracers on top of other packages: their spans land in the right rollout and name the calls that they are about."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.adapter import TracerTraceToTriplet
from agentlightning.gateway.recording.records import CALL_ID
from agentlightning.tracer import AgentOpsTracer, OtelTracer, Tracer, WeaveTracer
from agentlightning.types import Outcome
from tests.clients.conftest import World
from tests.clients.test_clients import TASKS, check_attribution, load
from tests.clients.tool import SYSTEM_PROMPT

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
        {"execute_tool calc"},
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
    ended = {r.attempt.outcome for r in run.rollouts}
    assert ended <= {Outcome.OK, Outcome.TRUNCATED}, {r.attempt.error for r in run.rollouts}
    check_attribution(run)
    for rollout in run.rollouts:
        spans = run.spans[rollout.rollout_id]
        calls = {call.info.response_id for call in run.calls[rollout.rollout_id]}
        theirs = [s for s in spans if s.name.startswith(prefix) and CALL_ID not in s.attributes]
        seen = [str(span.attributes.get("gen_ai.response.id")) for span in theirs]
        assert sorted(seen) == sorted(calls), "a span for each call, and none of another rollout's"
        assert wanted <= {span.name for span in spans}


async def test_older_words_of_weaves_tracer_change_nothing() -> None:
    pytest.importorskip("weave")
    taking: Any = WeaveTracer
    for words in ({"project_name": "x"}, {"weave_user_settings": None}, {"instrument_managed": True}):
        assert isinstance(taking(**words), WeaveTracer)
    with pytest.raises(agl.ConfigError, match="instrument_managed=False would have no effect"):
        taking(instrument_managed=False)


async def test_agent_framework_workflow_is_told_apart_by_its_executors(world: World) -> None:
    """Of two agents in a workflow one is picked by the id of its executor, from the real package's spans."""
    framework = pytest.importorskip("agent_framework")
    try:
        tracer = agent_framework_tracer()
    except ModuleNotFoundError as error:
        pytest.skip(f"not installed here: {error.name}")

    async def solve(question: str, llm: agl.LLM, _stream: bool) -> str:
        client = importlib.import_module("agent_framework.openai").OpenAIChatCompletionClient(
            model=llm.model, base_url=llm.endpoint, api_key=llm.api_key
        )
        first = framework.AgentExecutor(framework.Agent(client, SYSTEM_PROMPT, name="DataAnalyzer"), id="analyzer")
        second = framework.AgentExecutor(framework.Agent(client, SYSTEM_PROMPT, name="Advisor"), id="advisor")
        workflow = framework.WorkflowBuilder(start_executor=first, output_from=[second]).add_edge(first, second).build()
        return str((await workflow.run(question)).get_outputs()[-1])

    try:
        run = await world.run(solve, False, TASKS, scripted=True, tracer=tracer, named=False)
    finally:
        tracer.teardown()
    assert {r.attempt.outcome for r in run.rollouts} == {Outcome.OK}, [r.attempt.error for r in run.rollouts]
    for rollout in run.rollouts:
        spans, calls = run.spans[rollout.rollout_id], run.calls[rollout.rollout_id]
        found = {
            match: TracerTraceToTriplet(agent_match=match, llm_call_match="chat").adapt(spans, calls)
            for match in (None, "analyzer", "advisor", "DataAnalyzer")
        }
        assert {match: len(triplets) for match, triplets in found.items()} == {
            None: 2,
            "analyzer": 1,
            "advisor": 1,
            "DataAnalyzer": 0,
        }
        assert [call.info.agent for call in calls] == ["analyzer", "advisor"], "known while it runs"
        (mine,) = found["analyzer"]
        assert mine.prompt["token_ids"] == calls[0].prompt_ids.tolist()
        assert mine.response["token_ids"] == calls[0].response_ids.tolist()


async def test_langchain_takes_the_tracers_handler(world: World) -> None:
    """As 0.3's scripts give it; what is recorded is what the gateway records, and nothing twice."""
    pytest.importorskip("langchain_openai")
    agent, tracer = load("langgraph_agent"), OtelTracer()
    handler = tracer.get_langchain_handler(tags=["mine"])  # pyright: ignore[reportAttributeAccessIssue]
    base = importlib.import_module("langchain_core.callbacks").BaseCallbackHandler
    assert isinstance(handler, base)
    config = importlib.import_module("langchain_core.runnables.config")

    async def solve(question: str, llm: agl.LLM, stream: bool) -> str:
        with config.set_config_context({"callbacks": [handler], "metadata": {"of": question}}) as context:
            return await asyncio.create_task(agent.solve(question, llm, stream), context=context)

    run = await world.run(solve, False, TASKS, scripted=agent.SCRIPTED, tracer=tracer, named=False)
    ended = {r.attempt.outcome for r in run.rollouts}
    assert ended <= {Outcome.OK, Outcome.TRUNCATED}, {r.attempt.error for r in run.rollouts}
    assert len(run.all_calls()) == len(run.sampled) == run.exact() >= 2 * len(TASKS)
    check_attribution(run)
