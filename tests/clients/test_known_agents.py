"""Agents that have a name, as they are installed here, with a sub-agent each: nothing is refused, and the sub-agent
of a program that names it is trained alone. Those that are not installed are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.gateway import Gateway
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent
from agentlightning.rendering import RenderersRendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome, RolloutMode
from tests.gateway.conftest import rendering  # noqa: F401 (a fixture)
from tests.gateway.scripted import ScriptedEngine

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240), pytest.mark.filterwarnings("default")]

WITH_SUB_AGENTS = ("claude-code", "codex", "opencode", "qwen-code")
NAMED = ("claude-code", "codex", "opencode")
LOOKS: dict[str, Any] = {"description": "look", "prompt": "SUB-TASK: say hi"}
STARTS: dict[str, dict[str, Any]] = {
    "Agent": {**LOOKS, "subagent_type": "general-purpose"},
    "Task": {**LOOKS, "subagent_type": "general-purpose"},
    "agent": {**LOOKS, "subagent_type": "general-purpose"},
    "task": {**LOOKS, "subagent_type": "general"},
    "spawn_agent": {"message": LOOKS["prompt"], "agent_type": "default"},
}
"""What starts a sub-agent, by the tool's name."""


def delegating(prompt: str, _: object) -> str:
    """Starts a sub-agent, waits for it where that is a tool of its own, and ends."""
    tools = {n.split(".")[-1].split("__")[-1]: n for n in re.findall(r'"name": ?"([\w.\-]+)"', prompt)}
    starts = next((name for name in STARTS if name in tools), None)
    if "MAIN-TASK" in prompt and starts is not None and LOOKS["prompt"] not in prompt:
        return _call(tools[starts], STARTS[starts])
    started = re.search(r'agent_id\\*":\s*\\*"([0-9a-f-]{36})', prompt)
    if "MAIN-TASK" in prompt and started and "wait_agent" in tools and f'["{started[1]}"' not in prompt:
        return _call(tools["wait_agent"], {"targets": [started[1]], "timeout_ms": 30_000})
    return "All done."


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


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
        done = await runner.step({"prompt": "MAIN-TASK: delegate"}, resources={"llm": llm}, mode=RolloutMode.TRAIN)
        runner.teardown()
    assert done.attempt.outcome is Outcome.OK, done.attempt.error
    calls = (await store.query_calls([done.rollout_id]))[done.rollout_id]
    spans = (await store.query_spans(done.rollout_id)).items
    assert not [s.status.description for s in spans if s.attributes.get("error.type") == "refused"]
    assert not [c.info.divergence for c in calls if c.info.divergence and c.info.divergence.tokens_lost]
    if agent.name in WITH_SUB_AGENTS:
        assert any(c.info.parent_call_id for c in calls), "the main agent goes on from its own tokens"
    if agent.name in NAMED:
        names = {(c.info.agent or "").partition("/")[0]: c.info.trained for c in calls}
        assert names == {"main": False, "sub-agent": True}
