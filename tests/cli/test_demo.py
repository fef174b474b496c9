"""`agl demo`: which examples there are, and what one of them needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.trainer.example import load_example
from examples.math.reward import score
from tests.cli.test_looking import agl
from tests.typed import typed


def test_the_examples_are_listed_with_what_they_need() -> None:
    lines = agl("demo", "--list", width=300).stdout.splitlines()
    titles = {line.split(" demo ")[1].split()[0]: n for n, line in enumerate(lines) if " demo " in line}
    known = {"bidding", "calc", "code", "math", "rag", "sentiment", "sql", "support", "terminal", "werewolf"}
    assert known <= set(titles)
    assert "pip install -r" in lines[titles["math"] + 1]
    assert "after: npm install @openai/codex@0.169.0" in lines[titles["terminal"] + 1]
    assert "pip install" not in lines[titles["calc"] + 1]


@pytest.mark.parametrize("run_dir", ["a_file/run", "/proc/run"])
def test_a_demo_that_cannot_begin_says_only_why(tmp_path: Path, run_dir: str) -> None:
    (tmp_path / "a_file").write_text("")
    done = typed(tmp_path, "-m", "agentlightning", "demo", "calc", "--run-dir", run_dir)
    assert done.returncode == 1
    assert f"cannot write to {run_dir}" in done.stderr
    assert "resume" not in done.stdout + done.stderr


def test_an_example_whose_packages_are_not_installed_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "autogen_agentchat.agents", None)
    monkeypatch.setitem(sys.modules, "autogen_agentchat", None)
    with pytest.raises(ConfigError, match=r"needs the package 'autogen_agentchat.*install -r .*math/requirements\.txt"):
        load_example("math", "math_agent")


@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The answer is 43.", 43, 1.0),
        ("9 + 34 makes 1,043", 1043, 1.0),
        ("about 0.33333", 1 / 3, 1.0),
        ("0.34", 1 / 3, 0.0),
        ("-7", 7, 0.0),
        ("I do not know.", 0, 0.0),
    ],
)
def test_a_numeric_answer_has_a_tolerance(text: str, answer: float, reward: float) -> None:
    assert score(text, answer) == reward
