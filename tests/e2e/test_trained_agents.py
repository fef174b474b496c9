"""`trained_agents`: of two agents in one rollout, only one is trained and rated."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.errors import AgentError, ConfigError
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import InMemoryLightningStore

SETTINGS: dict[str, Any] = {"model": "calc", "tasks_per_step": 2, "group_size": 2, "max_context": 256, "val_every": 1}


async def game(task: str, llm: agl.LLM, rollout: agl.Rollout) -> None:
    """Two agents, one call each; what one wins the other loses."""
    won = next(TURNS[rollout.metadata.get("group")]) % 2
    for name, sign in (("white", 1), ("black", -1)):
        side = llm.for_agent(name)
        async with AsyncOpenAI(base_url=side.endpoint, api_key=side.api_key) as client:
            ask: Any = [{"role": "user", "content": f"You are {name}. {task}"}]
            await client.chat.completions.create(model=llm.model, messages=ask, max_tokens=8)
        agl.emit_reward(float(sign * won), agent=name)


class Game(agl.LitAgent[str]):
    """The same as a class."""

    async def rollout_async(self, task: str, resources: agl.NamedResources, rollout: agl.AttemptedRollout) -> None:
        llm: Any = resources["main_llm"]
        return await game(task, llm, rollout)


class Trained(Game):
    """One that needs no arguments to say it."""

    trained_agents = "^white$"

    def __init__(self) -> None:
        """As many do, without asking the base class."""


AGENTS: dict[str, Any] = {
    "decorator": lambda: agl.rollout(trained_agents="^white$")(game),
    "class": lambda: Game(trained_agents="^white$"),
    "attribute": Trained,
}


ADAPTERS: dict[str, Any] = {
    "adapter": agl.TracerTraceToTriplet(agent_match="^white$"),
    "described adapter": {"agent_match": "^white$"},
}

TURNS: dict[Any, Any] = defaultdict(itertools.count)
"""By group: every other sibling wins."""


async def fit(
    tmp_path: Path, agent: Any, store: InMemoryLightningStore, adapter: Any = None, **settings: Any
) -> list[dict[str, Any]]:
    trainer = agl.Trainer(
        algorithm=agl.GRPO(**SETTINGS, backend="inprocess", steps=1, **settings),
        store=store,
        run_dir=tmp_path / "run",
        console=SilentConsole(),
        adapter=adapter,
    )
    await trainer.fit_async(agent, ["a", "b"], ["c", "d"])
    return read_metrics(tmp_path / "run" / "metrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("by", [*AGENTS, "adapter", "settings", "described adapter"])
async def test_gradients_are_of_one_agent_only(tmp_path: Path, by: str) -> None:
    store = InMemoryLightningStore()
    if by in AGENTS:
        first, step = await fit(tmp_path, AGENTS[by](), store)
    elif by in ADAPTERS:
        first, step = await fit(tmp_path, agl.rollout(game), store, ADAPTERS[by])
    else:
        first, step = await fit(tmp_path, agl.rollout(game), store, train_agents="^white$")
    ids = [r.rollout_id for r in await store.query_rollouts(limit=-1) if r.mode is agl.RolloutMode.TRAIN]
    calls = [call for found in (await store.query_calls(ids)).values() for call in found]
    assert {c.info.agent: c.info.trained for c in calls} == {"white": True, "black": False}
    assert step["trained_tokens"] == sum(len(c.response_ids) for c in calls if c.info.agent == "white")
    assert step["grad_norm"] > 0
    assert step["reward"] == 0.5, "white's own, not the mean of both"
    assert first["val_reward"] == step["val_reward"] == 0.5
    await store.close()


@pytest.mark.slow
async def test_a_pattern_that_matches_nobody_is_named(tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    with pytest.raises(AgentError, match=r"train_agents='judge' chooses none .* 'black', 'white'"):
        await fit(tmp_path, agl.rollout(trained_agents="judge")(game), store)
    with pytest.raises(AgentError, match=r"train_agents='judge' chooses none"):
        await fit(tmp_path / "adapter", agl.rollout(game), store, {"agent_match": "judge"})
    await store.close()


async def test_two_words_for_it_that_differ_are_refused(tmp_path: Path) -> None:
    store = InMemoryLightningStore()
    with pytest.raises(ConfigError, match="Give only one"):
        await fit(tmp_path, agl.rollout(trained_agents="white")(game), store, train_agents="black")
    with pytest.raises(ConfigError, match="The adapter says agent_match='black'"):
        await fit(tmp_path, agl.rollout(trained_agents="white")(game), store, {"agent_match": "black"})
    with pytest.raises(ConfigError, match="no regular expression"):
        agl.rollout(trained_agents="(")(game)
    await store.close()
