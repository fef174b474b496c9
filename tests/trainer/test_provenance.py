"""`run.json` says where a run comes from, and `agl train --config run.json` repeats it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import agentlightning as agl
from agentlightning.cli.app import app
from agentlightning.cli.configuration import make_algorithm, run_of_config
from agentlightning.litagent import FunctionAgent
from agentlightning.trainer.folder import prepare_folder
from agentlightning.trainer.live import describe
from agentlightning.trainer.provenance import commit_of, hash_of, provenance
from tests.typed import agl as agl_command

AGENT = "def agent(task, llm):\n    return 1.0\n"


def test_a_run_can_be_repeated_from_its_file(tmp_path: Path) -> None:
    def agent(task: object, llm: object) -> float:
        return 1.0

    algorithm = agl.DAPO(model="calc", steps=7, learning_rate=3e-4, outcome_use={agl.Outcome.TIMEOUT: "zero"})
    about = provenance(tmp_path, FunctionAgent(agent), [{"q": 1}, {"q": 2}], [{"q": 3}])
    run = describe(tmp_path, algorithm, FunctionAgent(agent), about)
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["version"] == agl.__version__
    assert found["host"]
    assert found["start_time"] > 0
    assert (found["tasks"], found["tasks_hash"]) == (2, hash_of([{"q": 1}, {"q": 2}]))
    assert run.state["tasks_hash"] == found["tasks_hash"]
    again = make_algorithm(None, None, tmp_path / "run.json", [])
    assert replace(again, policies=()) == algorithm
    assert make_algorithm(None, None, tmp_path / "run.json", ["steps=9"]).steps == 9
    known = run_of_config(tmp_path / "run.json")
    assert known.agent == f"{__file__}:agent"
    assert known.tasks is not None
    assert known.val_tasks is not None
    assert known.tasks.read_text() == '{"q": 1}\n{"q": 2}\n'


def test_other_tasks_have_another_hash() -> None:
    assert hash_of([1, 2]) == hash_of([1, 2])
    assert len({hash_of(tasks) for tasks in ([1, 2], [2, 1], [1], [])}) == 4


def test_the_commit_says_whether_files_were_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "agent.py").write_text(AGENT)
    git("add", ".")
    git("commit", "-qm", "first")
    clean = commit_of(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "agent.py").write_text(AGENT * 2)
    assert commit_of(tmp_path) == f"{clean}+"
    assert commit_of(Path("/")) is None


@pytest.mark.slow
def test_the_command_takes_agent_and_tasks_of_the_run(tmp_path: Path) -> None:
    about = {"run_id": "r", "algorithm": "GRPO", "settings": {}, "source": "gone.py", "agent": "agent"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    none = agl_command(tmp_path, "train", "--config", "run.json")
    assert (none.returncode, "give --tasks FILE" in none.stderr) == (1, True), none.stderr
    (tmp_path / "tasks.jsonl").write_text("1\n")
    done = agl_command(tmp_path, "train", "--config", "run.json", "--trust")
    assert (done.returncode, "gone.py" in done.stderr) == (1, True), done.stderr


def test_the_command_takes_the_environment_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = agl.load_environment("gym:FrozenLake-v1", tasks=3, val_tasks=2, is_slippery=False)
    about = provenance(tmp_path, env.agent, env.tasks(), env.val_tasks())
    describe(tmp_path, agl.GRPO(model="calc"), env.agent, about)
    fitted: list[Any] = []
    result = SimpleNamespace(stopped=False, learned=True)
    monkeypatch.setattr("agentlightning.cli.train._fit", lambda _, *given: fitted.append(given) or result)
    command = ["train", "--config", str(tmp_path / "run.json")]
    refused = CliRunner().invoke(app, command)
    assert "the environment gym:FrozenLake-v1" in str(refused.exception)
    assert CliRunner().invoke(app, [*command, "--trust"]).exception is None
    [(agent, tasks, val)] = fitted
    assert agent.environment == env.agent.environment
    assert (tasks, val) == (list(env.tasks()), list(env.val_tasks()))


def test_a_run_with_a_league_can_be_repeated_from_its_file(tmp_path: Path) -> None:
    algorithm = agl.GRPO(model="calc", league=agl.League(draw="uniform", size=2))
    describe(tmp_path, algorithm, FunctionAgent(lambda task: 1.0))
    assert make_algorithm(None, None, tmp_path / "run.json", []).plays == algorithm.plays


def test_a_new_run_is_its_owners_to_read(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "run", resuming=False)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
