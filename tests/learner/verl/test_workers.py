"""verl's workers compute what the own learner does, in float32 over gloo; `make test-verl`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.learner.verl.installed import ENVIRONMENT, WHY_NOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


@pytest.fixture(scope="module")
def said(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("steps")
    command = [sys.executable, "-m", "tests.learner.verl.steps", str(tiny_model_dir), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "dpo", "reinforce"])
def test_losses_gradient_norms_and_weights_are_the_own_learners(said: list[dict[str, Any]], loss: str) -> None:
    """Over two steps that are halved; reinforce has a KL and an entropy term."""
    found = {line["workers"]: line for line in said if line.get("loss") == loss}
    assert set(found) == {0, 1, 2}
    for workers in (1, 2):
        assert found[workers]["numbers"] == pytest.approx(found[0]["numbers"], rel=1e-5, abs=1e-6)
        assert found[workers]["weights"] < 3e-5  # of steps that moved them by 5e-4
        assert found[workers]["moments"] < 1e-5


def test_the_own_learner_and_another_number_of_workers_go_on_from_what_was_written(said: list[dict[str, Any]]) -> None:
    third = {line["third"]: line["numbers"] for line in said if "third" in line}
    assert set(third) == {0, 1, 2}
    assert third[0] == pytest.approx(third[2], rel=1e-5, abs=1e-6)
    assert third[1] == pytest.approx(third[2], rel=1e-5, abs=1e-6)
