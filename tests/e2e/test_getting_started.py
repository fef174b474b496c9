"""The first script of docs/getting-started.md runs as written, and what it leaves can be evaluated."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "getting-started.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def run(*command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT, check=False, timeout=240
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The script's folder and what it printed; with the model that ships, in two steps."""
    folder = tmp_path_factory.mktemp("first")
    script = next(b for b in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL) if ".fit(" in b)
    (folder / "train.py").write_text(re.sub(r"agl\.GRPO\(.*?\)", 'agl.GRPO(model="calc", steps=2)', script))
    done = run("-W", "error", "train.py", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_dry_run_says_what_came_of_it_and_the_training_follows(ran: tuple[Path, str]) -> None:
    folder, printed = ran
    assert "4 rollouts, mean reward" in printed
    assert "at learning rate 0.00034, the default for that size" in printed
    assert "2/2" in printed
    assert "step  reward" in printed
    assert printed.rstrip().endswith("checkpoints/step-000002")
    metrics = next(folder.glob("runs/*/metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 2]
    assert json.loads(next(folder.glob("runs/*/run.json")).read_text())["settings"]["steps"] == 2


def test_eval_finds_the_agent_and_the_validation_tasks_of_the_run(ran: tuple[Path, str]) -> None:
    folder, _ = ran
    run_dir = next(folder.glob("runs/*"))
    for more in ([], ["--tasks", "tasks.jsonl"]):
        task = {"question": "What is 1 + 2?", "call": {"a": 1, "op": "+", "b": 2}}
        (folder / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        done = run("-m", "agentlightning", "eval", str(run_dir), "--trust", *more, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Gain on the same tasks" in done.stdout
        assert ("On the 50 validation tasks of the run" in done.stderr) == (not more)
