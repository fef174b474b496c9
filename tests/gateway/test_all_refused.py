"""An agent all of whose model calls were refused: its rollout is no success with a reward of 0, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning.algorithm.episode import collect
from agentlightning.doctor import Evidence
from agentlightning.doctor.in_rollouts import rollout_findings
from agentlightning.gateway import Gateway
from agentlightning.rendering import RenderersRendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from tests.gateway.conftest import calculator
from tests.gateway.scripted import ScriptedEngine

GOOD: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}]}
FIELD: dict[str, Any] = {**GOOD, "temperature": "warm"}
CASES: dict[str, tuple[Sequence[tuple[str, dict[str, Any]]], bool, Outcome, str | None]] = {
    "a field": ([("/chat/completions", FIELD)] * 2, False, Outcome.AGENT_ERROR, "'temperature'"),
    "a path": ([("/engines/x/edits", GOOD)], False, Outcome.AGENT_ERROR, "There is no path /engines/x/edits"),
    "a field, and it raises": ([("/chat/completions", FIELD)], True, Outcome.AGENT_ERROR, "'temperature'"),
    "one is answered": ([("/chat/completions", FIELD), ("/chat/completions", GOOD)], False, Outcome.OK, None),
    "all are answered": ([("/chat/completions", GOOD)], False, Outcome.OK, None),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
async def test_a_rollout_that_had_no_answer_is_a_failure_which_names_the_refusal(
    store: InMemoryLightningStore, rendering: RenderersRendering, case: str
) -> None:
    asked, raises, outcome, words = CASES[case]

    @agl.rollout
    async def agent(task: str, llm: agl.LLM) -> float:
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {llm.api_key}"}) as client:
            for path, fields in asked:
                await client.post(f"{llm.endpoint}{path}", json=fields)
        if raises:
            raise ValueError("I had no answer")
        return 0.0

    async with Gateway(store, ScriptedEngine(rendering, calculator), rendering) as gateway:
        runner = LitAgentRunner(agl.DummyTracer(), gateway=gateway)
        runner.init(agent)
        runner.init_worker(0, store)
        for _ in range(8):
            try:
                await runner.step("task", resources={"llm": gateway.as_resource()})
            except ValueError:
                assert raises
        runner.teardown()
    rollouts = await store.query_rollouts()
    episodes = await collect(store, [r.rollout_id for r in rollouts])
    assert {e.outcome for e in episodes} == {outcome}
    findings = {f.code: f for f in rollout_findings(Evidence(episodes=episodes))}
    if words is None:
        assert "calls_refused" not in findings
        return
    for e in episodes:
        assert e.attempt is not None
        assert words in (e.attempt.error or "")
    assert "never_called" not in findings
    assert words in findings["calls_refused"].words
    assert "base_url=" not in findings["calls_refused"].fix
