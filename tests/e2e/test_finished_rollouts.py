"""What was sampled by the very weights that an interrupted run goes on from is kept; the rest is sampled, once each."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from agentlightning.algorithm.sampling.source import WEIGHTS
from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Call, Rollout, RolloutMode, RolloutStatus
from tests.e2e.test_kill import ENVIRONMENT

TASKS, SIBLINGS = 4, 3

AGENT = """
import asyncio
from pathlib import Path
import agentlightning as agl
from agentlightning.trainer.example import load_example

calc_agent = load_example("calc", "calc_agent").calc_agent
Path("begun").mkdir(exist_ok=True)

@agl.rollout
async def agent(task: dict, llm: agl.ProxyLLM, rollout: agl.Rollout) -> float:
    if rollout.metadata["step"] == 2 and not Path("go").exists():
        Path("begun", rollout.rollout_id).touch()
        number = sorted(Path("begun").iterdir(), key=lambda path: path.stat().st_mtime_ns)
        if [path.name for path in number].index(rollout.rollout_id) % 3 == 0:
            while not Path("go").exists():
                await asyncio.sleep(0.02)
    return await calc_agent.function(task, llm=llm)
"""

SCRIPT = f"""
import sys
import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole
from an_agent import agent

algorithm = agl.GRPO(
    model="calc", steps=3, tasks_per_step={TASKS}, group_size={SIBLINGS}, learning_rate=float(sys.argv[2]),
    max_context=512, save_every=1,
)
trainer = agl.Trainer(algorithm=algorithm, run_dir="run", resume=sys.argv[1] or None, console=SilentConsole())
trainer.fit(agent, load_example("calc", "recipe").train_tasks()[:20])
"""


def start(folder: Path, resume: str = "", rate: str = "1e-4") -> subprocess.Popen[str]:
    (folder / "an_agent.py").write_text(AGENT)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, resume, rate],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=ENVIRONMENT,
    )


async def finished(folder: Path) -> list[tuple[Rollout, list[Call]]]:
    """Of step 2."""
    store = SqliteLightningStore(folder / "run" / "store.db")
    try:
        done = [RolloutStatus.SUCCEEDED, RolloutStatus.FAILED]
        found = await store.query_rollouts(mode_in=[RolloutMode.TRAIN], step_in=[2], status_in=done, limit=-1)
        records = await store.query_records([r.rollout_id for r in found])
        return [(record.rollout, list(record.calls)) for record in records]
    finally:
        await store.close()


def wait_until_all_that_can_have_ended(folder: Path, process: subprocess.Popen[str]) -> None:
    """A third of the second step's rollouts waits for a file."""
    begun, deadline = folder / "begun", time.monotonic() + 120
    while len(list(begun.glob("*"))) < TASKS * SIBLINGS and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    time.sleep(3.0)


def check_each_is_used_once(folder: Path, kept: set[str]) -> None:
    found = asyncio.run(finished(folder))
    assert Counter(r.metadata["group"] for r, _ in found) == {f"2-{n}": SIBLINGS for n in range(TASKS)}
    assert {r.metadata["task"] for r, _ in found} == set(read_metrics(folder / "run" / "metrics.jsonl")[-2]["tasks"])
    assert len(kept) >= TASKS * SIBLINGS // 2, "a run that had finished nothing would prove nothing"
    assert kept < {r.rollout_id for r, _ in found}
    assert len({r.metadata[WEIGHTS] for r, _ in found}) == 1
    (row,) = [m for m in read_metrics(folder / "run" / "metrics.jsonl") if m["step"] == 2]
    assert row["rollouts"] == TASKS * SIBLINGS
    versions = {run.version for _, calls in found for call in calls for run in call.versions}
    assert len(versions) == 1, "all by the same weights"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_death_of_the_model_process_costs_no_finished_rollout(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_until_all_that_can_have_ended(tmp_path, process)
    (model,) = [
        c
        for c in psutil.Process(process.pid).children(recursive=True)
        if c.cmdline()[-2:-1] == ["agentlightning.backend.embedded"]
    ]
    (tmp_path / "go").touch()
    model.send_signal(signal.SIGKILL)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    before = {path.name for path in (tmp_path / "begun").iterdir()}
    kept = {r.rollout_id for r, _ in asyncio.run(finished(tmp_path)) if r.rollout_id in before}
    check_each_is_used_once(tmp_path, kept)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rate", ["1e-4", "2e-4"])
def test_a_killed_run_goes_on_with_what_it_had_finished_unless_it_is_another(tmp_path: Path, rate: str) -> None:
    process = start(tmp_path)
    wait_until_all_that_can_have_ended(tmp_path, process)
    for member in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        member.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    kept = {r.rollout_id for r, _ in asyncio.run(finished(tmp_path))}
    (tmp_path / "go").touch()
    process = start(tmp_path, resume="run", rate=rate)
    printed, _ = process.communicate(timeout=200)
    assert process.returncode == 0, printed
    if rate == "1e-4":
        check_each_is_used_once(tmp_path, kept)
    else:
        assert len(asyncio.run(finished(tmp_path))) == len(kept) + TASKS * SIBLINGS, "all of them are sampled anew"
