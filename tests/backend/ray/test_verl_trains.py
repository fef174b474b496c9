"""Training with verl's workers as the learner, on a local Ray cluster; `make test-verl`."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics import read_metrics
from tests.learner.verl.installed import ENVIRONMENT, WHY_NOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

STEPS = 6
VAL_TASKS = 100
"""The example's, each with a reward of 0 or 1."""
CHANCE = 3 * math.sqrt(2 * 0.25 / VAL_TASKS)
"""A rise that nothing learned shows once in a thousand runs: three standard errors of the difference of two means."""


def train(folder: Path, steps: int, *arguments: str) -> str:
    """What the run said."""
    command = [sys.executable, "-m", "tests.backend.ray.verl_run", str(folder), str(steps), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_run(folder: Path, count: int) -> list[dict[str, Any]]:
    """Each step was done once and its weights were published: the engine samples from what the workers have."""
    rows: list[dict[str, Any]] = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(count + 1))
    assert max(row["logprob_gap_max"] for row in rows[1:]) < 1e-3
    for step in (count - 1, count):
        model = folder / "checkpoints" / f"step-{step:06}" / "model"
        assert json.loads((model / "agentlightning.json").read_text())["version"] == 2 * step  # of two minibatches
    return rows


def test_the_calculator_learns(tmp_path: Path) -> None:
    train(tmp_path, STEPS)
    first, *_, last = check_run(tmp_path, STEPS)
    assert last["val_reward"] > first["val_reward"] + CHANCE


def test_a_worker_that_is_killed_is_named_and_the_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    """An adapter's run over three nodes, of which a worker is killed in a pass of the third step."""
    words = train(tmp_path, 4, json.dumps({"lora_rank": 8}), "2")
    rows = check_run(tmp_path, 4)
    killed = re.search(r"killed process (\d+)", words)
    assert killed, words
    assert re.search(rf"verl worker \d \(process {killed[1]} on .*\) ended: The actor died", words), words
    assert words.count("The run goes on from") == 1, words
    assert "The run goes on from " + str(tmp_path / "checkpoints" / "step-000002") in words
    tasks = Counter(task for row in rows[1:] for task in row["tasks"])
    assert set(tasks.values()) == {1}, "each task was taken once"
    assert (tmp_path / "checkpoints" / "step-000004" / "model" / "adapter_model.safetensors").is_file()
