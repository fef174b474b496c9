"""Agents that have a name, as they are installed here, with a sub-agent each: nothing is refused, and the sub-agent
of a program that names it is trained alone. Those that are not installed are skipped.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.adapter.atif import trajectory_of
from agentlightning.gateway import Gateway
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent
from agentlightning.rendering import RenderersRendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome, RolloutMode
from tests.adapter.test_atif import check as check_atif, sampled_ids
from tests.clients.stand_ins import DELEGATES, delegating, writing
from tests.environments.harbor_tasks import engine_or_skip, write_task
from tests.gateway.conftest import rendering  # noqa: F401 (a fixture)
from tests.gateway.scripted import ScriptedEngine

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

WITH_SUB_AGENTS = ("claude-code", "codex", "opencode", "qwen-code")
NAMED = ("claude-code", "codex", "opencode")


@pytest.mark.parametrize("agent", KNOWN_AGENTS.values(), ids=list(KNOWN_AGENTS))
async def test_the_sub_agent_alone_is_trained(agent: KnownAgent, rendering: RenderersRendering) -> None:  # noqa: F811
    if shutil.which(agent.program) is None:
        pytest.skip(f"not installed: {agent.install}")
    store = InMemoryLightningStore()
    engine = ScriptedEngine(rendering, delegating, max_context=200_000)
    train = "^sub-agent" if agent.name in NAMED else None
    async with Gateway(store, engine, rendering, train_agents=train) as gateway:
        runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
        runner.init(agl.Program(agent.name, grader=lambda run: 1.0))
        runner.init_worker(0, store)
        llm = gateway.as_resource()
        done = await runner.step(DELEGATES, resources={"llm": llm}, mode=RolloutMode.TRAIN)
        runner.teardown()
    assert done.attempt.outcome is Outcome.OK, done.attempt.error
    calls = (await store.query_calls([done.rollout_id]))[done.rollout_id]
    spans = (await store.query_spans(done.rollout_id)).items
    assert not [s.status.description for s in spans if s.attributes.get("error.type") == "refused"]
    assert not [c.info.divergence for c in calls if c.info.divergence and c.info.divergence.tokens_lost]
    whole = trajectory_of(spans, calls, session_id="ro", trajectory_id="at", extra={})
    assert whole is not None
    check_atif(whole)
    assert sorted(map(tuple, sampled_ids(whole))) == sorted(tuple(c.response_ids.tolist()) for c in calls)
    assert agent.name not in WITH_SUB_AGENTS or whole.get("subagent_trajectories")
    if agent.name in WITH_SUB_AGENTS:
        assert any(c.info.parent_call_id for c in calls), "the main agent goes on from its own tokens"
    if agent.name in NAMED:
        names = {(c.info.agent or "").partition("/")[0]: c.info.trained for c in calls}
        assert names == {"main": False, "sub-agent": True}


@pytest.mark.parametrize("name", ["qwen-code", "opencode", "mini-swe-agent"])
async def test_it_does_a_task_of_harbor(name: str, rendering: RenderersRendering, tmp_path: Path) -> None:  # noqa: F811
    agent = KNOWN_AGENTS[name]
    if shutil.which(agent.program) is None:
        pytest.skip(f"not installed: {agent.install}")
    write_task(tmp_path / "task")
    env = agl.load_environment(f"harbor:{tmp_path}", agent=name, **engine_or_skip("bubblewrap"))
    store = InMemoryLightningStore()
    async with Gateway(store, ScriptedEngine(rendering, writing, max_context=200_000), rendering) as gateway:
        runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
        runner.init(env.agent)
        runner.init_worker(0, store)
        llm = gateway.as_resource()
        done = await runner.step(env.tasks()[0], resources={"llm": llm}, mode=RolloutMode.TRAIN)
        runner.teardown()
    assert done.attempt.outcome is Outcome.OK, done.attempt.error
    spans = (await store.query_spans(done.rollout_id)).items
    assert agl.find_final_reward(spans) == 1.0
    calls = (await store.query_calls([done.rollout_id]))[done.rollout_id]
    assert any(call.info.trained for call in calls)
