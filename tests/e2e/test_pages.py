"""The code of the guides runs as it stands: every kind of agent on the shipped model, and what happens to one token."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.episode import Episode
from tests.e2e.test_mcp_agent import SERVER

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "bring-your-own.md").read_text()
TASKS = [{"question": "What is 12 + 30?", "answer": 42}, {"question": "What is 90 - 25?", "answer": 65}]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def blocks(heading: str, language: str = "python") -> list[str]:
    """The blocks of one section of the guide."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


def loaded(code: str, folder: Path) -> Any:
    """A module of this code, in a file as its author would have it."""
    file = folder / "agent_of_the_page.py"
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ran(agent: Any, folder: Path, tasks: Sequence[Any] = TASKS, **settings: Any) -> Sequence[Episode]:
    baseline = agl.Baseline(model="calc", max_context=1024, **settings)
    agl.Trainer(algorithm=baseline, run_dir=folder / "run").fit(agent, tasks)
    assert [e.attempt and e.attempt.error for e in baseline.episodes] == [None] * len(tasks)
    assert all(e.reward is not None for e in baseline.episodes)
    return baseline.episodes


@pytest.mark.parametrize("heading", ["A Python function", "A class"])
def test_agents_in_python(heading: str, tmp_path: Path) -> None:
    (code,) = blocks(heading)
    for episode in ran(loaded(code, tmp_path).agent, tmp_path):
        assert len(episode.calls) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((program,), (code,)) = blocks("A program in any language", "javascript"), blocks("A program in any language")
    (tmp_path / "agent.mjs").write_text(program)
    for episode in ran(loaded(code, tmp_path).agent, tmp_path):
        assert len(episode.calls) == 1


def test_a_simulated_user(tmp_path: Path) -> None:
    (code,) = blocks("Several roles, or a simulated user")
    module = loaded(code, tmp_path)
    assert (module.algorithm.policies, module.algorithm.frozen) == (["assistant"], "user")
    for episode in ran(module.agent, tmp_path, policies={"assistant": None}, frozen="user"):
        assert [call.info.policy for call in episode.calls] == ["assistant", "user"] * module.TURNS
        assert [call.info.trained for call in episode.calls] == [True, False] * module.TURNS


def test_an_mcp_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp", reason="needs the package mcp")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.py").write_text(SERVER)
    (code,) = blocks("An MCP agent")
    assert all(episode.calls for episode in ran(loaded(code, tmp_path).agent, tmp_path))


SOLVE = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": task["text"]}], "max_tokens": 16}
headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
seen = os.path.exists(task["tests"])  # a program that could read the hidden tests would pass them all
open("answer.py", "w").write("def add(a, b):\\n    return a + " + ("b" if seen else "a"))
"""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_a_sandboxed_coding_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The page says `python`: this one, and no launcher that the sandbox does not hold.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    grade, code = blocks("A sandboxed coding agent")
    for name, text in {"agent/solve.py": SOLVE, "grader/grade.py": grade}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    hidden = tmp_path / "grader" / "tests.json"
    hidden.write_text(json.dumps({"add": ["add(1, 1) == 2", "add(1, 2) == 3"]}))
    task = {"name": "add", "text": "Write add(a, b).", "tests": str(hidden)}
    (episode,) = ran(loaded(code, tmp_path).agent, tmp_path, [task])
    assert len(episode.calls) == 1
    assert episode.reward == 0.5


def test_what_happens_to_one_token() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/pages.py", "docs/one-token.md", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def both_sides(library: str) -> list[str]:
    """The two scripts of a page: as it was written for the library, and for us."""
    page = (ROOT / "docs" / f"from-{library}.md").read_text()
    theirs, ours = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    return [theirs, ours]


def trains_for_two_steps(script: str, folder: Path) -> str:
    """Run it on the shipped model; what it prints."""
    (folder / "train.py").write_text(script.replace('"Qwen/Qwen3-0.6B"', '"calc"'))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(m["step"], m["rollouts"], m["failed"]) for m in steps if m["step"]] == [(1, 32, 0), (2, 32, 0)]
    return done.stdout + done.stderr


@pytest.mark.parametrize("library", ["trl", "verifiers", "art", "1.0"])
def test_our_side_of_a_migration_trains(library: str, tmp_path: Path) -> None:
    theirs, ours = both_sides(library)
    assert "agentlightning" not in theirs
    trains_for_two_steps(ours, tmp_path)


@pytest.mark.parametrize("written_for", ["0.3", "today"])
def test_both_scripts_of_the_page_for_0_3_train(written_for: str, tmp_path: Path) -> None:
    then, now = both_sides("0.3")
    told = trains_for_two_steps(then if written_for == "0.3" else now, tmp_path)
    assert ("This script uses names of agentlightning 0.2/0.3." in told) == (written_for == "0.3")
