"""The real Ray: a local cluster of three nodes learns, and goes on when parts of it are killed. `make test-ray`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is tested by `make test-ray`, which installs it"),
]
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def train(folder: Path, *arguments: str) -> tuple[list[dict[str, object]], str]:
    """The metrics of each step, and what the run said."""
    command = [sys.executable, "-m", "tests.backend.ray.three_nodes", str(folder / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=1400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert Path(json.loads(done.stdout.splitlines()[-1])["checkpoint"]).is_dir()
    return read_metrics(folder / "run" / "metrics.jsonl"), done.stderr


def check_the_stream(rows: list[dict[str, object]], steps: int, rollouts: int = 96) -> None:
    """Every step was done once, with all its rollouts, on tasks that no other step had."""
    assert [row["step"] for row in rows] == list(range(steps + 1))
    tasks = Counter(task for row in rows[1:] for task in row["tasks"])  # pyright: ignore
    assert set(tasks.values()) == {1}
    assert {row["rollouts"] for row in rows[1:]} == {rollouts}
    assert max(row["logprob_gap_max"] for row in rows[1:] if row["updates"]) < 1e-3  # pyright: ignore


def test_three_nodes_learn_whatever_is_killed(tmp_path: Path) -> None:
    rows, words = train(tmp_path, "12", "runner@1", "engine@2", "rank@3", "node@4")
    check_the_stream(rows, 12)
    assert rows[0]["val_reward"] < 0.5  # pyright: ignore[reportOperatorIssue]
    assert max(row["reward"] for row in rows[1:]) >= 0.85  # pyright: ignore
    for name in (r"runner \d", "engine 0", "learner rank"):
        assert re.search(rf"{name}.* \(process \d+ on .*\) ended: .*", words), words
    assert re.search(r"learner rank 1 \(process \d+ on .*\) ended", words), words
    assert words.count("The run goes on from") == 2, words
