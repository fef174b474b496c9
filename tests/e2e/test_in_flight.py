"""Responses that go on under new weights: learning does not wait for them; every token says which weights it is of."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.example import load_example

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def test_weights_change_under_running_responses(tmp_path: Path) -> None:
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    algorithm = agl.GRPO(
        model="calc",
        group_size=8,
        tasks_per_step=4,
        steps=6,
        learning_rate=2e-4,
        max_context=512,
        max_staleness=1,
        in_flight="continue",
    )
    store = SqliteLightningStore(tmp_path / "store.db")
    trainer = agl.Trainer(algorithm=algorithm, store=store, run_dir=tmp_path / "run")
    await trainer.fit_async(agent, recipe.train_tasks())
    rollouts = await store.query_rollouts(limit=-1)
    by_rollout = await store.query_calls([rollout.rollout_id for rollout in rollouts])
    calls = [call for found in by_rollout.values() for call in found]
    mixed = [call for call in calls if len(call.versions) > 1]
    assert mixed, "no response was interrupted by any of six updates"
    for call in mixed:
        versions = [run.version for run in call.versions]
        assert versions == sorted(set(versions))
    await store.close()
