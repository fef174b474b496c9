"""An advantage, a loss, a metrics sink, a wire format and a backend from outside the package, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.store import SqliteLightningStore

from ..gateway.test_own_dialect import ParlourDialect
from .bigram import BigramBackend
from .own_parts import CONSTANT, Diary, displaced, rank


@agl.rollout
async def agent(task: int, llm: agl.LLM) -> float:
    """Asks in a wire format that the package does not know; vowels are good."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{llm.endpoint}/parlour", json={"model": llm.model, "question": f"Say {task}."}) as response,
    ):
        text = (await response.json())["answer"]
    return sum(character in "aeiou" for character in text) / 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", [pytest.param("embedded", marks=pytest.mark.slow, id="embedded"), pytest.param(BigramBackend, id="own")]
)
async def test_parts_of_ones_own_need_no_change_to_the_package(tmp_path: Path, backend: Any) -> None:
    diary = Diary()
    algorithm = agl.GRPO(
        model="calc",
        backend=backend,
        advantage=rank,
        loss=displaced,
        steps=2,
        tasks_per_step=2,
        group_size=4,
        max_context=256,
        max_tokens=24,
        flat_steps=0,
        gradient_noise_every=0,  # the loss's constant would count in each half
    )
    trainer = agl.Trainer(
        algorithm=algorithm, run_dir=tmp_path, sinks=[diary], dialects=[ParlourDialect()], console=SilentConsole()
    )
    await trainer.fit_async(agent, list(range(20)))
    learned = [m for m in diary.rows if m.get("updates")]
    assert [m["step"] for m in diary.rows if m["step"]] == [1, 2]
    assert diary.runs
    assert diary.closed
    assert learned, "whoever is above the middle differs from whoever is not"
    if backend == "embedded":  # the table knows one loss only
        assert all(abs(m["loss"] - CONSTANT) < 5 for m in learned)
    store = SqliteLightningStore(tmp_path / "store.db")
    try:
        rollouts = await store.query_rollouts(limit=-1)
        calls = await store.query_calls([r.rollout_id for r in rollouts])
    finally:
        await store.close()
    assert {call.info.dialect for of_one in calls.values() for call in of_one} == {"parlour"}
