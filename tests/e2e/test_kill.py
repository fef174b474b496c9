"""kill -9 of a whole training run at random moments, and resuming.

Every task was taken once per epoch, the metrics go on in one stream, and in the deterministic mode the final weights
are those of a run that nobody killed, whatever a step samples besides its rollouts.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from agentlightning.metrics import read_metrics

ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}
TASKS, PER_STEP, EPOCHS = 8, 3, 2
STEPS = EPOCHS * 3

SCRIPT = f"""
import sys
import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole
from tests.golden.ways import asks_three

recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
train, val, more = recipe.train_tasks()[:{TASKS}], recipe.val_tasks()[:3], {{}}
if sys.argv[1] == "branches":  # rollouts of three calls, and others that go on from their states
    asked = recipe.train_tasks()
    agent, train, val = asks_three, [asked[3 * n : 3 * n + 3] for n in range({TASKS})], [val]
    more = dict(credit="branches", branches=agl.Branches(continuations=2, share=0.9), rollout_return="sum")
algorithm = agl.GRPO(
    model="calc", epochs={EPOCHS}, tasks_per_step={PER_STEP}, group_size=4, learning_rate=1e-4, max_context=512,
    save_every=1, val_every=2, deterministic=sys.argv[1] != "as usual", **more,
)
resume = "run" if sys.argv[2] == "resume" else None
trainer = agl.Trainer(algorithm=algorithm, run_dir="run", resume=resume, console=SilentConsole())
trainer.fit(agent, train, val)
"""


def start(folder: Path, mode: str, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, mode, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env=ENVIRONMENT,
    )


def kill_everything(process: subprocess.Popen[str]) -> None:
    """kill -9 of the run; its model process loses its socket and ends by itself, but need not get the time."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    psutil.wait_procs(family[1:], timeout=30)


def wait_for_a_step(process: subprocess.Popen[str], metrics: Path) -> None:
    """Until the run has done one step more than it had, or has ended."""
    before = steps_in(metrics)
    deadline = time.monotonic() + 120
    while process.poll() is None and steps_in(metrics) <= before and time.monotonic() < deadline:
        time.sleep(0.02)


def steps_in(metrics: Path) -> int:
    return len(read_metrics(metrics)) if metrics.exists() else 0


def shortest_step(metrics: Path) -> float:
    """In seconds: a kill within it costs one more step at most, however fast the machine."""
    rows = read_metrics(metrics) if metrics.exists() else []
    return min((m["sampling_seconds"] + m["learning_seconds"] for m in rows if "sampling_seconds" in m), default=0.2)


def run_with_kills(folder: Path, mode: str, rng: random.Random, kills: int) -> int:
    """Run to the end through so many deaths; how many there really were."""
    folder.mkdir()
    metrics, died = folder / "run" / "metrics.jsonl", 0
    while True:
        has_checkpoint = any((folder / "run").glob("checkpoints/step-*/checkpoint.json"))
        if not has_checkpoint and metrics.exists():
            metrics.unlink()  # died before the first checkpoint: that run is begun again from nothing
        process = start(folder, mode, "resume" if has_checkpoint else "anew")
        if died < kills:
            wait_for_a_step(process, metrics)
            time.sleep(rng.uniform(0.0, shortest_step(metrics)))
            if process.poll() is None:
                kill_everything(process)
                died += 1
                continue
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
        return died


def check_the_stream(folder: Path) -> None:
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    assert [m["step"] for m in rows] == list(range(STEPS + 1))
    taken = [m["tasks"] for m in rows[1:]]
    half = STEPS // EPOCHS
    for epoch in range(EPOCHS):
        tasks = Counter(t for step in taken[epoch * half : (epoch + 1) * half] for t in step)
        assert tasks == Counter(range(TASKS)), f"epoch {epoch}"
    assert [m["version"] for m in rows[1:] if m["updates"]] == sorted({m["version"] for m in rows[1:] if m["updates"]})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["deterministic", "branches"])
def test_killed_and_resumed_the_weights_are_those_of_a_run_that_nobody_killed(mode: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    process = start(tmp_path / "whole", mode, "anew")
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0, printed
    died = run_with_kills(tmp_path / "killed", mode, random.Random(os.getpid()), kills=3)
    assert died >= 2  # the third may come too late for a run this short
    check_the_stream(tmp_path / "whole")
    check_the_stream(tmp_path / "killed")
    weights = Path("run") / "checkpoints" / f"step-{STEPS:06d}" / "model" / "model.safetensors"
    assert (tmp_path / "whole" / weights).read_bytes() == (tmp_path / "killed" / weights).read_bytes()
    kept = ("step", "tasks", "reward", "val_reward", "loss", "grad_norm", "tokens", "version")
    rows = [read_metrics(tmp_path / name / "run" / "metrics.jsonl") for name in ("whole", "killed")]
    whole, killed = ([{k: m.get(k) for k in kept} for m in run] for run in rows)
    assert whole == killed
    assert any(m["updates"] for m in rows[0][1:]), "a run that learns nothing would prove nothing"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_random_moments_every_task_is_taken_once_per_epoch(tmp_path: Path) -> None:
    died = run_with_kills(tmp_path / "killed", "as usual", random.Random(os.getpid()), kills=3)
    assert died >= 2  # the third may come too late for a run this short
    check_the_stream(tmp_path / "killed")
