"""A learner over 1, 2 and 4 ranks computes what one learner does: to 1e-5 in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "adapter", "checkpointed"])
def test_ranks_compute_what_one_learner_does(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.learner.ranks", kind, str(tiny_model_dir), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = {r["ranks"]: r["numbers"] for r in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {0, 1, 2, 4}
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    *numbers, gap_of_states = found[4]
    assert numbers == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    assert gap_of_states < 1e-6
