"""Training with verl's workers as the learner, on a local cluster of three nodes; `make test-verl`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.backend.ray.test_three_nodes import check_the_stream, train
from tests.learner.verl.installed import WHY_NOT

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900), pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]


def test_the_calculator_learns_and_goes_on_when_a_worker_dies(tmp_path: Path) -> None:
    """Each step's weights are published: engines sample from what the workers have (the canary is in the stream's
    check). A worker that ends takes the run back to its last checkpoint, from which verl's workers go on."""
    rows, words = train(tmp_path, "3", "verl", "worker@1")
    check_the_stream(rows, 3)
    assert rows[0]["val_reward"] < 0.5  # pyright: ignore[reportOperatorIssue]
    assert rows[-1]["val_reward"] > rows[0]["val_reward"] + 0.1  # pyright: ignore[reportOperatorIssue]
    assert "A worker of verl's ended" in words
    assert words.count("The run goes on from") == 1, words
    last = tmp_path / "run" / "checkpoints" / "step-000003"
    assert json.loads((last / "model" / "agentlightning.json").read_text())["version"] == 3
