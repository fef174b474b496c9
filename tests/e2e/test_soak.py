"""The short form of `make soak`: many agents while parts of the system are killed and suspended; nothing is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_nothing_is_lost(tmp_path: Path) -> None:
    faults = "kill_agents,suspend_site,kill_site,fill_disk,step_clock"
    command = [sys.executable, str(SCRIPT), "--agents", "100", "--seconds", "60", "--faults", faults, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["lost_or_wrong"] == 0
    assert found["rollouts"] >= 100
    assert {"kill_agents", "suspend_site", "kill_site", "step_clock"} <= set(found["faults"])
