"""verl's workers compute what the own learner does, in float32 over gloo; `make test-verl`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.learner.verl.installed import ENVIRONMENT, WHY_NOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


@pytest.fixture(scope="module")
def said(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("steps")
    command = [sys.executable, "-m", "tests.learner.verl.steps", str(tiny_model_dir), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=850, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


ALONE, SHARED = {(0, 1), (1, 1), (2, 1)}, {(2, 2), (4, 2)}
"""How many workers, and how many of them share a row."""
CASES = [("all", "ppo_clip", {*ALONE, (2, 2)}), ("all", "gspo", ALONE), ("all", "dpo", ALONE)]
CASES += [("all", "reinforce", ALONE | SHARED), ("adapter", "ppo_clip", {*ALONE, (2, 2)}), ("adapter", "gspo", ALONE)]
CASES += [("adapter", "reinforce", ALONE | SHARED)]


@pytest.mark.parametrize(("trained", "loss", "layouts"), CASES)
def test_losses_gradient_norms_and_weights_are_the_own_learners(
    said: list[dict[str, Any]], trained: str, loss: str, layouts: set[tuple[int, int]]
) -> None:
    """Over two steps, some of them halved; reinforce has a KL and an entropy term."""
    lines = [line for line in said if (line["trained"], line.get("loss")) == (trained, loss)]
    found = {(line["workers"], line["shared"]): line for line in lines}
    own = found.pop((0, 1))["numbers"]
    assert {(0, 1), *found} == layouts
    for line in found.values():
        assert line["numbers"] == pytest.approx(own, rel=1e-5, abs=1e-6)
        assert line["weights"] < 3e-5  # of steps that moved them by 5e-4
        assert line["moments"] < 1e-5


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_the_own_learner_and_another_number_of_workers_go_on_from_what_was_written(
    said: list[dict[str, Any]], trained: str
) -> None:
    third = {line["third"]: line["numbers"] for line in said if "third" in line and line["trained"] == trained}
    assert set(third) == {0, 1, 2}
    assert third[0] == pytest.approx(third[2], rel=1e-5, abs=1e-6)
    assert third[1] == pytest.approx(third[2], rel=1e-5, abs=1e-6)


def test_files_in_bfloat16_keep_the_weights_that_were_stepped(said: list[dict[str, Any]]) -> None:
    """They are in float32; a step of 5e-4 is mostly less than the last digit of what is exported."""
    (line,) = (line for line in said if line["trained"] == "bfloat16")
    assert line["lost"]["rounded"] > 5e-4
    assert (line["lost"]["workers"], line["lost"]["own"]) == (0, 0)
    own, workers = line["numbers"]
    assert workers[:3] == pytest.approx(own[:3], rel=0.02), "loss, gradient norm, log-probs"
