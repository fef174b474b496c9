"""Each scheme from end to end with its real package, as it is typed: doctor, two steps of training, and an evaluation.

The model is the calculator's, which knows nothing of these tasks: what counts is that everything is taken and recorded.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from agentlightning.metrics import read_metrics
from tests.environments import test_foreign as foreign
from tests.environments.harbor_tasks import engine_or_skip, write_task
from tests.environments.interpreters import interpreter
from tests.environments.test_harbor import AGENT
from tests.environments.test_openenv import VERSION as OPENENV

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SETTINGS = {"steps": 2, "tasks_per_step": 1, "group_size": 2, "val_every": 2, "flat_steps": 0, "max_tokens": 24}

Scheme = Callable[..., "list[str]"]
"""Writes what an environment needs into a folder; gives `--env` and what else names it."""


def gym(folder: Path) -> list[str]:
    return ["--env", "gym:FrozenLake-v1", *options(tasks=4, val_tasks=2, max_episode_steps=3)]


def openenv(folder: Path) -> list[str]:
    python = interpreter("OPENENV_PYTHON", (f"openenv=={OPENENV}",), (sys.executable,))
    (folder / "openenv_app.py").write_text((ROOT / "tests" / "environments" / "openenv_app.py").read_text())
    return ["--env", "openenv:openenv_app:guess", *options(tasks=4, val_tasks=2, python=python)]


def inspect(folder: Path) -> list[str]:
    python = interpreter("INSPECT_PYTHON", (f"inspect-ai=={foreign.VERSION}", "openai>=3.4"), (sys.executable,))
    (folder / "sums.py").write_text(foreign.TASKS)
    return ["--env", "inspect:sums.py@sums", *options(val_tasks=1, python=python)]


def verifiers(folder: Path) -> list[str]:
    python = interpreter("VERIFIERS_PYTHON", ("verifiers==0.4.0",), (sys.executable,))
    (folder / "sums.py").write_text(foreign.SUMS)
    return ["--env", "verifiers:sums", *options(tasks=3, val_tasks=1, reward_key="length", python=python)]


def first_verifiers(folder: Path) -> list[str]:
    python = interpreter("FIRST_VERIFIERS_PYTHON", ("verifiers==0.1.14",), (sys.executable,))
    (folder / "asked_sums.py").write_text(foreign.ROWS)
    return ["--env", "verifiers:asked-sums", *options(tasks=3, val_tasks=1, python=python)]


def groups_of_verifiers(folder: Path) -> list[str]:
    """A rubric that compares the rollouts of a task."""
    return [*first_verifiers(folder), "--env-option", 'arguments={"together": true}']


def harbor(folder: Path) -> list[str]:
    """In bubblewrap, with a program of the task's own as the agent."""
    engine_or_skip("bubblewrap")
    if not Path("/usr/bin/python3").exists():
        pytest.skip("a Python of the system is not installed")
    for name in ("train/a", "train/b", "val/c"):
        write_task(
            folder / name,
            dockerfile="FROM localhost/agl-harbor-test\nWORKDIR /app\nCOPY agent.py .\n",
            files={"environment/agent.py": AGENT},
        )
    agent = "/usr/bin/python3 agent.py {task.prompt}"
    return ["--env", "harbor:./train", "--agent", agent, *options(val="./val", engine="bubblewrap")]


def options(**given: object) -> list[str]:
    return [word for name, value in given.items() for word in ("--env-option", f"{name}={value}")]


REWARDS = {
    gym: "reward",
    openenv: "reward",
    inspect: "reward/includes",
    verifiers: "reward/right",
    first_verifiers: "reward/right",
    groups_of_verifiers: "reward/compared",
    harbor: "reward/reward",
}
"""A column of the metrics that each has."""


@pytest.mark.parametrize("scheme", REWARDS, ids=[scheme.__name__ for scheme in REWARDS])
def test_a_whole_run(scheme: Scheme, tmp_path: Path) -> None:
    named = scheme(tmp_path)
    model = ["--model", "calc"]
    examined = agl(tmp_path, "doctor", *named, *model, codes=(0, 1))  # 1: what it says of a model that knows nothing
    assert "rollout" in examined
    settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    agl(tmp_path, "train", *named, *model, *settings, "--run-dir", "run", codes=(0, 1))  # 1: siblings earned the same
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    steps = [row for row in rows if row.get("step")]
    assert len(steps) == 2
    assert [row["failed"] for row in steps] == [0, 0]
    assert steps[-1]["val_reward"] is not None
    assert all(row["tokens"] > 0 and REWARDS[scheme] in row for row in steps)
    if scheme in (verifiers, groups_of_verifiers):  # by the length of what is said, which differs
        assert sum(row["updates"] for row in steps) > 0
    judged = agl(tmp_path, "eval", "run", "--trust")
    assert "Gain on the same tasks" in judged


def agl(folder: Path, *arguments: str, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints, typed in a folder."""
    found = f"{folder}:{ROOT}"
    environment = {**os.environ, "PYTHONPATH": found, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "agentlightning", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode in codes, f"{shlex.join(arguments)}: {said}"
    assert "Traceback" not in said, said
    return said
