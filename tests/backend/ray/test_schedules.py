"""The real Ray: two ranks, two engines and two runners on two nodes learn as one process does, while each of them and a
node die in an order that is drawn. `make test-ray`; `AGL_RAY_SCHEDULES=20` draws so many orders, of which one is run
otherwise, and `AGL_RAY_SCHEDULES_FROM` is the first's seed. `AGL_RAY_SCHEDULES_TASKS=4` takes a third of the rollouts,
too few to ask what was learned. `AGL_RAY_SCHEDULES_VLLM=…/vllm` has vLLM's servers as the engines. `-rP` prints what
was learned.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics import read_metrics

from .test_three_nodes import ENVIRONMENT, check_the_stream

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1900),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is tested by `make test-ray`, which installs it"),
]
TASKS = int(os.environ.get("AGL_RAY_SCHEDULES_TASKS", "12"))
"""Of a step, with eight rollouts each."""
STEPS = 10 if TASKS >= 12 else 20
"""Short ones are over before so many processes were killed."""
FIRST = int(os.environ.get("AGL_RAY_SCHEDULES_FROM", "0"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("AGL_RAY_SCHEDULES", "1")))


def run(folder: Path, seed: int, *more: str) -> str:
    command = [sys.executable, "-m", "tests.backend.ray.schedules", str(folder), str(STEPS), str(seed), *more]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "metrics.jsonl")


def learned(rows: list[dict[str, Any]]) -> list[float]:
    """The validation reward before and after, and the interval of the latter."""
    return [rows[0]["val_reward"], rows[-1]["val_reward"], rows[-1]["val_low"], rows[-1]["val_high"]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_schedule_of_deaths_changes_nothing(seed: int, tmp_path: Path) -> None:
    second = ["second"] if seed == SEEDS[0] else []
    found = json.loads(run(tmp_path / "run", seed, *second).splitlines()[-1])
    run(tmp_path / "embedded", seed, "embedded")
    rows, alone = rows_of(tmp_path / "run"), rows_of(tmp_path / "embedded")
    sys.stdout.write(f"{json.dumps({'seed': seed, **found, 'learned': learned(rows), 'embedded': learned(alone)})}\n")
    check_the_stream(rows, STEPS, 8 * TASKS)
    assert [row["tasks"] for row in rows[1:]] == [row["tasks"] for row in alone[1:]]
    assert len(found["killed"]) == 7
    assert rows[-1]["val_low"] <= alone[-1]["val_high"], (rows[-1], alone[-1])
    assert alone[-1]["val_low"] <= rows[-1]["val_high"], (rows[-1], alone[-1])
    if TASKS >= 12:
        assert rows[-1]["val_reward"] > rows[0]["val_high"], "it has learned"
    if second:
        assert found["second"] == 0
        check_the_stream(rows_of(tmp_path / "second"), STEPS, 8 * TASKS)
