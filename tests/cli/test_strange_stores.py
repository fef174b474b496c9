"""Stores of runs made to do harm, or that somebody wrote into: what looks at a run reads them or says what is wrong."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import AgentLightningError, StoreError
from agentlightning.metrics.sink import checked_row
from agentlightning.types import Rollout
from tests.cli.test_looking import agl, record
from tests.doctor.test_why import WELL

ODD: list[Any] = [[1], {"a": [1]}, "x", "<script>alert(1)</script>", True, None, 2**63, -1, 1.5, "\x1b]0;x\x07"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    record(tmp_path / "run", WELL)
    return tmp_path / "run"


def written(run: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(run / "store.db")) as store:
        store.execute(statement, values)
        store.commit()


@pytest.mark.parametrize("value", ODD)
def test_a_step_and_a_group_may_be_anything(run: Path, value: Any) -> None:
    written(run, "UPDATE rollouts SET metadata = ?", json.dumps({"step": value, "group": value}))
    assert agl("why", run).exit_code in (0, 1)
    assert "\x1b]" not in agl("show", run).stdout
    agl("report", run, "--to", run / "report.html")
    assert "<script>alert" not in (run / "report.html").read_text()


def test_a_step_is_a_whole_number_and_a_group_a_text() -> None:
    found = [Rollout(rollout_id="r", input=0, metadata={"step": odd, "group": odd}) for odd in ODD]
    assert [one.step for one in found] == [None, None, None, None, None, None, None, -1, None, None]
    assert all(one.group is None or isinstance(one.group, str) for one in found)
    assert Rollout(rollout_id="r", input=0).group is None


@pytest.mark.parametrize("value", ["'x'", "'nan'", "x'ff'"])
@pytest.mark.parametrize("table", ["rollouts", "attempts"])
@pytest.mark.parametrize("column", ["start_time", "end_time"])
def test_a_text_in_the_place_of_a_time_is_named(run: Path, table: str, column: str, value: str) -> None:
    written(run, f"UPDATE {table} SET {column} = {value}")
    with pytest.raises(StoreError, match="is no time"):
        agl("why", run)


@pytest.mark.parametrize("value", ["5", '"x"', "[1]", "[[1]]", "[[1, 2, 3]]", '[["a", 1]]', "[" * 3_000, "x"])
def test_versions_of_weights_that_are_none_are_named(run: Path, value: str) -> None:
    written(run, "UPDATE segments SET versions = ?", value)
    with pytest.raises(StoreError, match="damaged in the store: its versions are no pairs of numbers"):
        agl("why", run)


@pytest.mark.parametrize("value", ['"x"', "[1]", "9" * 400, "true", "null"])
def test_a_metric_that_is_no_number_is_named(run: Path, value: str) -> None:
    written(run, "UPDATE run_events SET data = json_set(data, '$.loss', json(?)) WHERE kind = 'step'", value)
    if value in ("true", "null"):
        assert agl("why", run).exit_code in (0, 1)
        return
    for command in (("why", run), ("report", run, "--to", run / "report.html")):
        with pytest.raises(AgentLightningError, match=r"run_events\.data of '.*' is damaged.*'loss' is"):
            agl(*command)


def test_a_row_of_metrics_has_a_step_and_numbers() -> None:
    assert checked_row({"step": 1, "loss": None, "note": "x"})["step"] == 1
    for row in (
        [],
        {},
        {"step": "1"},
        {"step": -1},
        {"step": 2**53},
        {"step": 1, "reward": "x"},
        {"step": 1, "a/b": []},
    ):
        with pytest.raises(ValueError, match="number"):
            checked_row(row)
