"""`examples/own_algorithm`: an advantage and a loss from outside the package, run as a user would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.metrics import read_metrics

FOLDER = Path(__file__).parents[2] / "examples" / "own_algorithm"


def test_both_together_are_short() -> None:
    assert sum(len((FOLDER / f"{name}.py").read_text().splitlines()) for name in ("advantages", "losses")) < 60


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_trains(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), "1"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = read_metrics(next(tmp_path.glob("runs/*/metrics.jsonl")))
    assert [m["step"] for m in steps] == [0, 1]
    assert steps[1]["updates"] == 4, "two minibatches, twice"
    assert steps[1]["grad_norm"] > 0
    assert steps[1]["clip_fraction"] == 0
    assert steps[1]["kl_old"] > 0
