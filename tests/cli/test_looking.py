"""The commands that look at runs, as a user types them: what they print, as text and as JSON, and how they exit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from agentlightning.cli.app import app
from agentlightning.store import SqliteLightningStore
from tests.doctor.recorded import Recording, write
from tests.doctor.test_why import SICK, WELL


def agl(*arguments: object, width: int = 100) -> Result:
    """Run a command in this process; an error of ours is raised as it is."""
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def as_json(*arguments: object) -> Any:
    return json.loads(agl(*arguments, "--json").stdout)


def record(folder: Path, *recordings: Recording) -> list[str]:
    """A run's folder with these runs in its store; their ids."""

    async def fill() -> list[str]:
        store = SqliteLightningStore(folder / "store.db")
        found = [await write(store, recording) for recording in recordings]
        await store.close()
        return found

    folder.mkdir(parents=True, exist_ok=True)
    return asyncio.run(fill())


@pytest.fixture
def well(tmp_path: Path) -> Path:
    record(tmp_path / "well", WELL)
    return tmp_path / "well"


@pytest.fixture
def sick(tmp_path: Path) -> Path:
    record(tmp_path / "sick", SICK["no reward"][2])
    return tmp_path / "sick"


def test_why_says_that_a_run_learns(well: Path) -> None:
    result = agl("why", well)
    assert "It is learning" in result.stdout
    assert result.exit_code == 0
    found = as_json("why", well, "--breaks")
    assert (found["findings"], found["breaks"]) == ([], [])


def test_why_names_the_problem_and_exits_with_1(sick: Path) -> None:
    result = agl("why", sick)
    assert "32 of 32 (100%) rollouts ended without a reward" in result.stdout
    assert "First thing to try: Return a number" in " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert as_json("why", sick)["findings"][0]["code"] == "no_reward"


def test_why_shows_breaks(tmp_path: Path) -> None:
    record(tmp_path, SICK["other tools"][2])
    text = agl("why", tmp_path, "--breaks").stdout
    assert "tools_changed" in text
    assert "Offer the same tools" in " ".join(text.split())


def test_one_of_several_runs_in_a_store(tmp_path: Path) -> None:
    first, second = record(tmp_path, SICK["no reward"][2], WELL)
    assert as_json("why", tmp_path)["run_id"] == second
    assert as_json("why", tmp_path, "--run-id", first)["findings"][0]["code"] == "no_reward"
