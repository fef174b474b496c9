"""A Python, a Node and a shell agent that know nothing of Agent Lightning are trained, and their reward rises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"
PYTHON = f"{sys.executable} -S"
SETTINGS = ["steps=5", "tasks_per_step=6", "group_size=8", "minibatches=2", "learning_rate=5e-4", "max_context=512"]
AGENTS = {
    "python": ([f"{PYTHON} {EXAMPLES}/agent.py"], "tasks.jsonl"),
    "node": ([f"node {EXAMPLES}/agent.js"], "tasks.jsonl"),
    "sh": (
        [f"sh {EXAMPLES}/agent.sh", "--task-as", "env", "--grader", f"{PYTHON} {EXAMPLES}/grade.py"],
        "one_step.jsonl",
    ),
}


@pytest.mark.parametrize("language", list(AGENTS))
def test_a_program_is_trained_without_a_changed_line(language: str, tmp_path: Path) -> None:
    needed = {"python": sys.executable, "node": "node", "sh": "curl"}[language]
    if shutil.which(needed) is None:
        pytest.skip(f"needs {needed}")
    agent, tasks = AGENTS[language]
    command = [sys.executable, "-m", "agentlightning", "train", "--agent", *agent, "--tasks", str(EXAMPLES / tasks)]
    command += [argument for setting in SETTINGS for argument in ("--set", setting)]
    command += ["--concurrency", "16", "--run-dir", "run"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rewards = [m["reward"] for m in rows]
    assert len(rewards) == 5
    assert sum(m["failed"] for m in rows) == 0, done.stdout
    assert max(rewards[-2:]) > rewards[0] + 0.15, rewards
