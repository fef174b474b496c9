"""On-policy distillation through the whole system: a fresh model gets as far as its teacher, in far fewer rollouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics

SCRIPT = """
import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")


def train(algorithm, folder):
    trainer = agl.Trainer(algorithm=algorithm, run_dir=folder, concurrency=96, console=SilentConsole())
    trainer.fit(calc.calc_agent, recipe.train_tasks(), recipe.val_tasks())


common = {**recipe.SETTINGS, "model": "calc", "val_every": 100, "save_every": 100}
train(agl.GRPO(**{**common, "steps": 16}), "teacher")
small = {"steps": 20, "tasks_per_step": 12, "group_size": 2, "minibatches": 4, "learning_rate": 3e-4}
train(agl.Distill(**{**common, **small, "schedule": "constant"}, teacher="teacher"), "student")
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_fresh_model_gets_as_far_as_its_teacher(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    teacher, student = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("teacher", "student"))
    rollouts = [sum(m.get("rollouts", 0) for m in rows) for rows in (teacher, student)]
    assert rollouts == [16 * 96, 20 * 24]
    shown = [(m.get("reward"), m.get("kl_teacher")) for m in student]
    assert student[-1]["val_reward"] > teacher[-1]["val_reward"] - 0.2, shown
    assert student[-1]["val_reward"] > student[0]["val_reward"] + 0.3, shown
