"""Settings that change what is learned: with each of them the calculator is learned, through the whole system."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentlightning.learner.packing import is_kept
from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPT = """
import sys

import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
COMMON = {**recipe.SETTINGS, "steps": 16, "tasks_per_step": 6, "schedule": "constant", "val_every": 100}


ALGORITHMS = {
    "replay": lambda: agl.GRPO(**{**COMMON, "model": "calc"}, replay=2),
    "filter": lambda: agl.GRPO(**{**COMMON, "model": "calc"}, top_p=0.9, filter_replay=True),
}
trainer = agl.Trainer(algorithm=ALGORITHMS[sys.argv[1]](), run_dir="run", concurrency=96, console=SilentConsole())
trainer.fit(calc.calc_agent, recipe.train_tasks(), recipe.val_tasks())
"""
METRIC_OF = {"replay": "replayed", "filter": "logprob_gap_max"}


@pytest.mark.parametrize("way", METRIC_OF)
def test_the_calculator_is_learned(tmp_path: Path, way: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT, way]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    shown = [(m.get("reward"), m.get(METRIC_OF[way]), m.get("val_reward")) for m in rows]
    assert rows[-1]["val_reward"] > rows[0]["val_reward"] + 0.2, shown
    assert max(m.get("logprob_gap_max", 0.0) for m in rows) < 1e-3, shown
    assert max(m.get(METRIC_OF[way], 0.0) for m in rows) > 0, shown


async def test_what_training_drew_from_is_in_its_store(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT.replace('"steps": 16', '"steps": 1'), "filter"]
    await asyncio.to_thread(subprocess.run, command, check=True, cwd=tmp_path, env=environment)
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    rollouts = await store.query_rollouts(limit=-1)
    calls = await store.query_calls([r.rollout_id for r in rollouts if r.mode == "train"])
    await store.close()
    sampled = [call for of in calls.values() for call in of]
    assert any(np.abs(call.logprobs - call.plain_logprobs).max() > 0.05 for call in sampled)
    for call in sampled:
        differ = np.abs(call.logprobs - call.plain_logprobs) > 1e-6
        assert (is_kept(call) | ~differ).all(), "wherever a filter made a difference it is known what it kept"
