"""`agl export --jsonl`: which rollouts are written, and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.types import Outcome
from agentlightning.types.finding import counted
from tests.adapter.test_atif import check as check_atif
from tests.adapter.test_finetuning import CHECKS
from tests.cli.test_looking import agl, record
from tests.doctor.recorded import Recording, Said, Told


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two tasks, three rollouts each, of which one failed; a judge speaks in one of them."""
    judge = Said(text="I judge it to be good.", trained=False)

    def group(task: str, *rewards: float) -> list[Told]:
        return [Told(reward=r, calls=(Said(text=f"{task} earned {r:g}"), judge), task=task) for r in rewards]

    failed = Told(reward=1.0, outcome=Outcome.AGENT_ERROR, error="broke", calls=(Said(text="broken"),), task="A")
    record(tmp_path / "run", Recording(groups=[[*group("A", 0.0, 0.5, 1.0), failed], group("B", 0.2, 0.1, 0.0)]))
    return tmp_path / "run"


def said(file: Path) -> list[Any]:
    return [json.loads(line)["messages"][-1]["content"] for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), ["A earned 0", "A earned 0.5", "A earned 1", "B earned 0.2", "B earned 0.1", "B earned 0"]),
        (("--min-reward", 0.2), ["A earned 0.5", "A earned 1", "B earned 0.2"]),
        (("--best-per-task",), ["A earned 1", "B earned 0.2"]),
        (("--best-per-task", "--min-reward", 0.5), ["A earned 1"]),
    ],
)
def test_the_rollouts_that_are_asked_for_without_judges_and_failures(
    run: Path, tmp_path: Path, options: tuple[Any, ...], expected: list[str]
) -> None:
    result = agl("export", run, "--jsonl", tmp_path / "good.jsonl", *options, width=200)
    assert said(tmp_path / "good.jsonl") == expected
    assert f": {counted(len(expected), 'conversation')} of" in result.stdout


def test_as_a_table_with_rewards(run: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    agl("export", run, "--parquet", tmp_path / "good.parquet", "--jsonl", tmp_path / "good.jsonl", "--min-reward", 0.2)
    rows = parquet.read_table(tmp_path / "good.parquet").to_pylist()
    assert [row["messages"][-1]["content"] for row in rows] == said(tmp_path / "good.jsonl")
    assert [row["reward"] for row in rows] == [0.5, 1.0, 0.2]
    assert [json.loads(row["task"]) for row in rows] == ["A", "A", "B"]
    with pytest.raises(ConfigError, match=r"should end in \.parquet"):
        agl("export", run, "--parquet", tmp_path / "table")


def test_as_trajectories(run: Path, tmp_path: Path) -> None:
    result = agl("export", run, "--atif", tmp_path / "atif", "--min-reward", 0.2, width=200)
    assert "3 trajectories" in result.stdout
    found = [json.loads(file.read_text()) for file in (tmp_path / "atif").iterdir()]
    for trajectory in found:
        check_atif(trajectory)
    assert sorted(trajectory["extra"]["reward"] for trajectory in found) == [0.2, 0.5, 1.0]
    with pytest.raises(ConfigError, match="there already"):
        agl("export", run, "--atif", tmp_path / "atif")
    with pytest.raises(ConfigError, match="command of its own"):
        agl("export", run, "--atif", tmp_path / "other", "--to", tmp_path / "model")


@pytest.mark.parametrize("form", CHECKS)
def test_in_the_form_of_the_service(run: Path, tmp_path: Path, form: str) -> None:
    agl("export", run, "--jsonl", tmp_path / "good.jsonl", "--format", form)
    lines = (tmp_path / "good.jsonl").read_text().splitlines()
    assert len(lines) == 6
    for line in lines:
        CHECKS[form](json.loads(line))


def test_nothing_is_overwritten_and_nothing_is_no_file(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "good.jsonl"
    with pytest.raises(ConfigError, match="--min-reward 2"):
        agl("export", run, "--jsonl", file, "--min-reward", 2)
    with pytest.raises(ConfigError, match="--mode val"):
        agl("export", run, "--jsonl", file, "--mode", "val")
    assert not file.exists()
    file.write_text("mine")
    with pytest.raises(ConfigError, match="there already"):
        agl("export", run, "--jsonl", file)
    assert file.read_text() == "mine"
