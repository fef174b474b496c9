"""Whole scripts as they were written for 0.2 and 0.3 run to their end, and are told once what one writes today."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.provider import serving

WITHOUT_OLD_NAMES = ("apart",)
SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_runs_as_it_is(script: Path, tmp_path: Path) -> None:
    with serving() as provider:
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=os.environ | provider,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    told = (done.stdout + done.stderr).count("This script uses names of agentlightning 0.2/0.3.")
    assert told == (script.stem not in WITHOUT_OLD_NAMES)
    assert "Traceback" not in done.stdout + done.stderr
