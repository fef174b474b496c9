"""Whole scripts as they were written for 0.2 and 0.3 run to their end, and are told once what one writes today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_as_it_is(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("This script uses names of agentlightning 0.2/0.3.") == 1
    assert "Traceback" not in done.stdout + done.stderr
