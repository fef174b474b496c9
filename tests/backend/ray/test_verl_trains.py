"""Training with verl's workers as the learner, on a local Ray cluster; `make test-verl`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
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


def test_the_calculator_learns(tmp_path: Path) -> None:
    """Each step's weights are published: the engine samples from what the workers have (the canary is the gap)."""
    command = [sys.executable, "-m", "tests.backend.ray.verl_run", str(tmp_path / "run"), str(STEPS)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=850, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    check_run(tmp_path / "run")


def check_run(folder: Path) -> None:
    rows: list[dict[str, Any]] = read_metrics(folder / "metrics.jsonl")
    first, *steps = rows
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert max(row["logprob_gap_max"] for row in steps) < 1e-3
    assert steps[-1]["val_reward"] > first["val_reward"] + CHANCE
    for step in (STEPS - 1, STEPS):
        model = folder / "checkpoints" / f"step-{step:06}" / "model"
        assert json.loads((model / "agentlightning.json").read_text())["version"] == 2 * step  # of two minibatches
