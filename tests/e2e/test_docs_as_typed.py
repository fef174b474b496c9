"""README and getting started, followed literally in a fresh folder: commands and scripts end in what is promised."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README, PAGE = (ROOT / name for name in ("README.md", "docs/getting-started.md"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "200",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}


def typed(command: str, folder: Path) -> str:
    """What a command prints that is typed into a shell in `folder`; it must succeed."""
    done = subprocess.run(
        command, shell=True, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def block(page: Path, holding: str, language: str = "python") -> str:
    """The block of a page with these words in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return next(b for b in blocks if holding in b)


def metrics(folder: Path) -> list[dict[str, float]]:
    """The rows of the only run in a folder."""
    (file,) = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def commands(text: str) -> list[str]:
    """The `agl show` and `agl eval` lines of a text, as they are to be typed."""
    return [
        line.strip()
        for line in re.findall(r"^(?:\$| ) *(agl (?:show|eval) \S+(?: --trust)?)", text, flags=re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the words of `python train.py`, as getting started has it."""
    folder = tmp_path_factory.mktemp("started")
    (folder / "train.py").write_text(block(PAGE, ".fit("))
    return folder, typed("python train.py", folder)


def test_the_reward_rises_as_getting_started_promises(started: tuple[Path, str]) -> None:
    folder, printed = started
    assert "the reward rises from below 0.5 to about 0.9" in PAGE.read_text()
    rewards = [row["reward"] for row in metrics(folder) if row["step"]]
    validated = [row["val_reward"] for row in metrics(folder) if row.get("val_reward") is not None]
    assert rewards[0] < 0.5
    assert max(rewards[-3:]) > 0.85
    assert validated[-1] > validated[0] + 0.2
    assert "left" in printed


def test_its_commands_work_and_those_that_are_printed(started: tuple[Path, str]) -> None:
    folder, printed = started
    (run,) = folder.glob("runs/*-*")
    written = [re.sub(r"runs/\S+", f"runs/{run.name}", line) for line in commands(PAGE.read_text())]
    pasted = commands(printed)
    assert [line.split()[1] for line in (*written, *pasted)] == ["show", "eval", "show", "eval"]
    told = [typed(line, folder) for line in (*written, *pasted)]
    assert all("What is" in text for text in told[::2]), "the questions of rollouts"
    assert all("Gain on the same tasks" in text for text in told[1::2])


def test_the_agent_of_the_readme_learns(tmp_path: Path) -> None:
    agent = block(README, "calc_agent")
    assert "[the whole file](examples/calc/calc_agent.py)" in README.read_text(), "where its other names are"
    header = "from calc_parts import CALC_TOOL, MAX_TURNS, SYSTEM_PROMPT, calculate, score\n"
    tasks = "from agentlightning.trainer.example import load_example\nrecipe = load_example('calc', 'recipe')\n"
    data = "tasks, held_out = recipe.train_tasks()[:160], recipe.val_tasks()[:40]\n"
    shutil.copy(ROOT / "examples" / "calc" / "calc_agent.py", tmp_path / "calc_parts.py")
    (tmp_path / "agent.py").write_text(header + tasks + data + agent)
    typed("python agent.py", tmp_path)
    rows = metrics(tmp_path)
    assert len([row for row in rows if row["step"]]) == 10
    assert rows[-1]["reward"] > rows[1]["reward"] + 0.1
    (run,) = tmp_path.glob("runs/*")
    assert {"metrics.jsonl", "curve.png", "checkpoints", "store.db"} <= {path.name for path in run.iterdir()}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_node_agent_of_the_readme_trains(tmp_path: Path) -> None:
    (command,) = re.findall(r"^ +(agl train --agent \"node .*)$", README.read_text(), flags=re.MULTILINE)
    programs = ROOT / "examples" / "programs"
    shutil.copy(programs / "agent.js", tmp_path)
    tasks = (programs / "one_step.jsonl").read_text().splitlines()[:32]
    (tmp_path / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
    typed(command, tmp_path)
    assert len([row for row in metrics(tmp_path) if row["step"]]) == 2
