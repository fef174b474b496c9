"""`examples/own_loop`: the flat loop runs as a user would run it, learns, and leaves a model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).parents[2] / "examples" / "own_loop" / "loop.py"


def test_it_is_one_short_file() -> None:
    assert len(LOOP.read_text().splitlines()) < 160


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_learns_and_publishes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(LOOP), "2"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ +\d  reward 0\.\d+", done.stdout, flags=re.MULTILINE)) == 2, done.stdout
    assert len(re.findall(r"gradient [\d.]+", done.stdout)) == 2
    assert (tmp_path / "runs" / "own-loop" / "model" / "config.json").is_file()
