"""`fit` where an event loop runs already, as in a notebook: the caller's Ctrl-C reaches the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole

NOTEBOOK = """
import asyncio, sys
import agentlightning as agl
from agentlightning.metrics import SilentConsole

async def agent(task):
    print("running", flush=True)
    await asyncio.sleep(60)

async def cell():
    trainer = agl.Trainer(run_dir="run", console=SilentConsole())
    print("stopped:", trainer.fit(agent, [1]).stopped)

asyncio.run(cell())
"""


async def test_fit_inside_a_running_loop(tmp_path: Path) -> None:
    algorithm = agl.Baseline()
    agl.Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole()).fit(len, ["one", "three"])
    assert [e.reward for e in algorithm.episodes] == [3.0, 5.0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to send")
def test_ctrl_c_in_a_notebook_stops_the_run(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"
    os.kill(child.pid, signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert "stopped: True" in out, err
