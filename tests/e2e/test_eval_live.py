"""`agl eval` on a run that is going on, from another process: it measures its newest checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics
from agentlightning.trainer.example import load_example
from agentlightning.trainer.live import LIVE_FILE

CALC = Path(__file__).parents[2] / "examples" / "calc" / "calc_agent.py"
SETTINGS = (
    "model=calc",
    "steps=5000",
    "tasks_per_step=2",
    "group_size=2",
    "save_every=1",
    "val_every=100",
    "flat_steps=0",
)
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def agl(*arguments: str, folder: Path, output: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agentlightning", *arguments]
    return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, text=True, stdout=output, stderr=output)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_goes_on_is_evaluated_beside_it(tmp_path: Path) -> None:
    run, tasks = tmp_path / "run", tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in load_example("calc", "recipe").val_tasks()[:8]))
    what = ("--agent", f"{CALC}:calc_agent", "--tasks", str(tasks), "--val-tasks", str(tasks), "--run-dir", str(run))
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    training = agl("train", *what, *settings, folder=tmp_path, output=subprocess.DEVNULL)
    try:
        while training.poll() is None and not list(run.glob("checkpoints/step-*/checkpoint.json")):
            time.sleep(0.1)
        evaluation = agl("eval", str(run), "--limit", "8", folder=tmp_path, output=subprocess.PIPE)
        answer, trouble = evaluation.communicate(timeout=200)
        assert evaluation.returncode == 0, trouble
        assert "Gain on the same tasks" in answer
        assert (run / LIVE_FILE).exists()
        done = len(read_metrics(run / "metrics.jsonl"))
        while training.poll() is None and len(read_metrics(run / "metrics.jsonl")) <= done:
            time.sleep(0.1)
        training.send_signal(signal.SIGINT)
        training.wait(timeout=100)
    finally:
        training.kill()
        training.wait()
    assert training.returncode == 130
    assert not (run / LIVE_FILE).exists()
