"""Prompts are tuned with the core package alone: nothing heavy and no client is imported on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OF_EXTRAS = "torch transformers peft safetensors renderers numpy openai httpx jinja2 matplotlib gepa"
SCRIPT = """
import pathlib, sys
sys.modules.update(dict.fromkeys(sys.argv[2].split()))  # importing one of these raises
from tests.algorithm.prompts.fakes import FakeClient, apo, helpful, tune, words_agent

tuner = apo(FakeClient(helpful))
tune(tuner, words_agent([]), pathlib.Path(sys.argv[1]))
print(tuner.get_best_prompt().template)
"""


@pytest.mark.slow
def test_apo_runs_without_any_extra(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run"), OF_EXTRAS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("Solve {question} alpha beta gamma")
