"""Ctrl-C ends every command with status 130, in words, and advises only what works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SLOW_AGENT = """
import asyncio
from pathlib import Path

import agentlightning as agl


@agl.rollout
async def agent(task, llm):
    Path("began").touch()
    await asyncio.sleep(600)
    return 1.0
"""


def interrupted(folder: Path, *arguments: str) -> tuple[int, str]:
    """Ctrl-C as soon as an agent runs: the exit status, and what was printed."""
    (folder / "agent.py").write_text(SLOW_AGENT)
    (folder / "tasks.jsonl").write_text("1\n2\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "agentlightning", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"},
    )
    deadline = time.monotonic() + 120
    while not (folder / "began").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


@pytest.mark.parametrize(
    ("arguments", "words", "resumes"),
    [
        pytest.param(
            ["eval", "calc", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl"],
            "nothing to compare",
            False,
            marks=pytest.mark.slow,
        ),
        (["train", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl"], "Go on with the same command", True),
        pytest.param(
            ["run", "--agent", "agent.py:agent", "--tasks", "tasks.jsonl", "--model", "calc"],
            "Stopped.",
            False,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["eval", "train", "run"],
)
def test_before_there_is_anything(tmp_path: Path, arguments: list[str], words: str, resumes: bool) -> None:
    status, printed = interrupted(tmp_path, *arguments)
    assert status == 130, printed
    assert words in printed
    assert "Traceback" not in printed
    assert ("--resume" in printed) is resumes, "a run is saved before its first step"
