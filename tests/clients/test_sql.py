"""`examples/sql` as it is, before an engine that makes the mistake that the question wants: the graph's nodes name the
agents, the two that write are trained and the one that checks is not, every call is captured token by token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.emitter import get_rewards
from agentlightning.engine.base import Engine
from agentlightning.gateway import Gateway
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Outcome
from examples.sql import prompts
from examples.sql.schemas import SCHEMAS, make_database
from tests.clients.conftest import Run, SayingEngine, WitnessedEngine, World, carried_out

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("default"),  # other people's packages
]

RIGHT, WRONG = "SELECT COUNT(*) FROM customers", "SELECT COUNT(*) FROM custumers"
FIRST, SECOND, NEVER = (f"How many customers are there? Right at the {n}." for n in ("first", "second", "never"))
NAMES = {
    FIRST: ["write", "check"],
    SECOND: ["write", "check", "rewrite", "check"],
    NEVER: ["write", "check", "rewrite", "check", "rewrite", "check"],
}
REWARDS: dict[str, dict[str, float]] = {
    FIRST: {"correct": 1.0, "writer": 1.0, "checker": 1.0},
    SECOND: {"correct": 1.0, "writer": 0.0, "checker": 1.0, "rewriter": 1.0},
    NEVER: {"correct": 0.0, "writer": 0.0, "checker": 1.0, "rewriter": 0.0},
}


def _say(prompt: str) -> str:
    """What the role in the prompt would say of the question in it."""
    if prompts.CHECK in prompt:
        return "WRONG: no such table" if WRONG in prompt else prompts.RIGHT
    right = FIRST in prompt or (SECOND in prompt and prompts.REWRITE in prompt)
    return f"```sql\n{RIGHT if right else WRONG}\n```"


async def test_nodes_name_the_agents_and_decide_who_is_trained(world: World, tmp_path: Path) -> None:
    pytest.importorskip("langgraph", reason="LangGraph is not installed here: examples/sql/requirements.txt")
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed here")
    make_database(SCHEMAS[0], tmp_path / "shop.sqlite")
    tasks = [{"database": str(tmp_path / "shop.sqlite"), "question": q, "query": RIGHT} for q in [*NAMES] * 5]
    run = await run_all(world.process, tasks)
    assert {r.attempt.outcome for r in run.rollouts} == {Outcome.OK}, {r.attempt.error for r in run.rollouts}
    for rollout in run.rollouts:
        calls = run.calls[rollout.rollout_id]
        assert [call.info.agent for call in calls] == NAMES[rollout.input["question"]]
        assert [call.info.trained for call in calls] == [call.info.agent != "check" for call in calls]
        rewards = [get_rewards(span) for span in run.spans[rollout.rollout_id]]
        assert [r for r in rewards if r] == [REWARDS[rollout.input["question"]]]
    assert run.exact() == len(run.all_calls()) == len(run.sampled) == 5 * sum(map(len, NAMES.values()))


async def run_all(process: Engine, tasks: list[dict[str, Any]]) -> Run:
    """All at once, in one process and over one HTTP client."""
    from examples.sql.sql_agent import sql_agent

    engine = WitnessedEngine(SayingEngine(process, _say))
    store = InMemoryLightningStore()
    gateway = Gateway(store, engine, load_rendering(resolve_model("calc")), train_agents="^(write|rewrite)$")
    return await carried_out(sql_agent, tasks, engine, store, gateway)
