"""Runners in processes of their own: forked with the agent as it is, replaced when killed, gone when the trainer is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.types import Outcome, RolloutConfig


def fit(tmp_path: Path, agent: Any, tasks: list[Any], config: RolloutConfig | None = None, **options: Any) -> Any:
    algorithm = agl.Baseline(rollout_config=config or RolloutConfig())
    options = {"strategy": "processes", "n_runners": 2, "concurrency": 2, **options}
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "run", console=SilentConsole(), **options)
    trainer.fit(agent, tasks)
    return algorithm.episodes


def test_agents_run_in_processes_of_their_own(tmp_path: Path) -> None:
    offset = 10.0  # a closure: nothing is pickled

    @agl.rollout
    async def agent(task: float) -> float:
        import asyncio

        await asyncio.sleep(0.1)
        agl.emit_annotation({"pid": os.getpid()})
        return task + offset

    before = set(psutil.Process().children())
    episodes = fit(tmp_path, agent, [float(n) for n in range(12)])
    assert [e.reward for e in episodes] == [n + offset for n in range(12)]
    workers = {e.attempt.worker_id for e in episodes}
    assert len(workers) == 2
    assert not any(f"-{os.getpid()}-" in w for w in workers)
    left = set(psutil.Process().children()) - before
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_a_runner_that_is_killed_is_replaced_and_its_work_done_again(tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    @agl.rollout
    def agent(task: int) -> float:
        if task == 3 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return float(task)

    config = RolloutConfig(unresponsive_seconds=2.0)
    episodes = fit(tmp_path, agent, list(range(8)), config, n_runners=1, concurrency=1)
    assert [e.reward for e in episodes] == [float(n) for n in range(8)]
    assert episodes[3].attempt.sequence_id == 2


@pytest.mark.slow
def test_runners_that_die_again_and_again_end_the_run(tmp_path: Path) -> None:
    class Dies(agl.DummyTracer):
        def init(self) -> None:
            os._exit(7)

    @agl.rollout
    def agent(task: int) -> float:
        return 1.0

    with pytest.raises(agl.AgentLightningError, match="runner processes ended"):
        fit(tmp_path, agent, [1], tracer=Dies())


SCRIPT = """
import sys, time
import agentlightning as agl

def agent(task: int) -> float:
    time.sleep(1000)
    return 1.0

agl.Trainer(strategy="processes", n_runners=2, run_dir=sys.argv[1]).fit(agent, [1, 2])
"""


@pytest.mark.slow
def test_the_runners_end_when_the_trainer_is_killed(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path / "run")], stdout=subprocess.DEVNULL)
    parent = psutil.Process(trainer.pid)
    deadline = time.monotonic() + 30
    while len(runners := parent.children(recursive=True)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    _, alive = psutil.wait_procs(runners, timeout=25)
    assert not alive


def test_outcomes_come_from_processes_too(tmp_path: Path) -> None:
    @agl.rollout
    def agent(task: str) -> Any:
        if task == "raises":
            raise KeyError(task)
        return "text"

    episodes = fit(tmp_path, agent, ["raises", "returns text"])
    assert [e.outcome for e in episodes] == [Outcome.AGENT_ERROR] * 2
