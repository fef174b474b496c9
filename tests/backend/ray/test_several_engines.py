"""The real Ray: several engines on one machine, several machines, several runs at once. `make test-ray`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics import read_metrics

from .test_three_nodes import ENVIRONMENT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(560),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is tested by `make test-ray`, which installs it"),
]


MODEL_BYTES = 681_024 * 4


def several(*arguments: Any) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-m", "tests.backend.ray.several_engines", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize(("engines", "nodes", "runs"), [(2, 1, 1), (3, 1, 1), (3, 2, 1), (2, 1, 2)])
def test_every_engine_has_every_publication(engines: int, nodes: int, runs: int) -> None:
    found, _ = several(engines, nodes, runs)
    assert len(found) == runs
    for run in found:
        assert run["versions"] == [step for step in (1, 2, 3) for _ in range(engines)]
        assert max(run["gaps"]) < 1e-4 < run["moved"]
        assert run["left"] == []
        assert all(set(seconds) == {f"engine {number}" for number in range(engines)} for seconds in run["seconds"])
        first, *_, last = run["bytes"]
        assert MODEL_BYTES < first < 1.1 * MODEL_BYTES * nodes, "a machine's copy is for all of its engines"
        assert last == 3 * first


def test_weights_that_vanish_replace_an_engine_and_end_no_run() -> None:
    ((run,), words) = several(2, 1, 1, "clean")
    assert run["cleaned"][0] == 1 < run["cleaned"][1]
    assert run["versions"] == [1, 1, 2, 2, 3, 3]
    assert max(run["gaps"]) < 1e-4 < run["moved"]
    assert run["left"] == []
    assert "did not take the weights, in 3 tries" in words
    assert "do not fit" not in words


def test_a_run_that_waits_for_resources_says_so() -> None:
    command = [sys.executable, "-m", "tests.backend.ray.waiting"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["then"]) == 1, "once for one event"


def test_engines_come_with_a_machine_and_leave_with_it() -> None:
    command = [sys.executable, "-m", "tests.backend.ray.growing"]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["before the first request"] == 1, "runners have their places first"
    assert found["concurrency"] == 3 * 8
    assert found["draining"]
    assert found["lengths"] == [300] * 24, "what a machine that drains was sampling is finished"
    assert len(found["gaps"]) == 1 + 3 + 1 + 1
    assert max(found["gaps"]) < 1e-4 < found["moved"]


def leaving(run_dir: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "tests.backend.ray.leaving", str(run_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_a_runner_leaves_a_machine_that_drains_and_loses_nothing(tmp_path: Path) -> None:
    found, _ = leaving(tmp_path / "run")
    assert found["gone_after"] >= 1, "it left while the run went on"
    assert found["attempts"] == {"1": 6 * 96}, "no rollout was tried again"


def test_ranks_leave_a_machine_that_drains_once_there_is_another_and_lose_nothing(tmp_path: Path) -> None:
    found, words = leaving(tmp_path / "run", "rank")
    assert 3 <= found["gone_after"] < 6, "they left while the run went on"
    assert len(found["saved"]) >= 2, "each step was saved, although save_every is 100"
    assert found["attempts"] == {"1": 6 * 96}, "no rollout was tried again"
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"]]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert len({task for row in rows for task in row["tasks"]}) == 6 * 12, "no step took another's tasks"
    draining = "The machines of learner rank 0 and learner rank 1 are draining."
    assert f"{draining} The run saves each step until there is room." in words
    assert f"{draining} The run starts again on other machines after this step." in words
    assert "The run goes on from" in words
