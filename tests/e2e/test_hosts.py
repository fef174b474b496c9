"""Three hosts, simulated by network namespaces, train against one trainer; one of them is cut off and returns."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types import AttemptStatus, Outcome, RolloutStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

TAG = f"agl{os.getpid() % 10000}"
SUBNET = f"10.{77 + os.getpid() % 100}.0"
CALC_AGENT = Path(__file__).parents[2] / "examples" / "calc" / "calc_agent.py"
STEPS, TASKS, GROUP = 24, 6, 6
"""More steps than fit in the time one host is away."""
TRAINER = f"""
import sys
import agentlightning as agl
from agentlightning.trainer.example import load_example

agent = load_example("calc", "calc_agent").calc_agent
algorithm = agl.GRPO(
    model="calc", steps={STEPS}, tasks_per_step={TASKS}, group_size={GROUP}, learning_rate=2e-4, max_context=512,
    rollout_config=agl.RolloutConfig(unresponsive_seconds=6.0, timeout_seconds=60.0),
)
agl.Trainer(algorithm=algorithm, strategy="remote", run_dir=sys.argv[1]).fit(
    agent, load_example("calc", "recipe").train_tasks()
)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _why_not() -> str | None:
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    probe = subprocess.run(["ip", "netns", "add", f"{TAG}-probe"], capture_output=True, check=False)
    if probe.returncode:
        return f"network namespaces cannot be made here: {probe.stderr.decode().strip()}"
    ip("netns", "del", f"{TAG}-probe")
    return None


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Three namespaces on a bridge, whose address is this machine's."""
    if why := _why_not():
        pytest.skip(why)
    names = [f"{TAG}-{n}" for n in range(3)]
    try:
        ip("link", "add", f"{TAG}br", "type", "bridge")
        ip("addr", "add", f"{SUBNET}.1/24", "dev", f"{TAG}br")
        ip("link", "set", f"{TAG}br", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("link", "add", f"{TAG}v{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"{TAG}v{number}", "master", f"{TAG}br", "up")
            ip("-n", name, "addr", "add", f"{SUBNET}.{10 + number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", f"{TAG}br")


def start_runner(host: str, port: int, folder: Path, environment: dict[str, str]) -> subprocess.Popen[Any]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "agentlightning", "runner"]
    command += ["--server", f"http://{SUBNET}.1:{port}", "--agent", f"{CALC_AGENT}:calc_agent", "--concurrency", "6"]
    with (folder / f"{host}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def wait_until_served(host: str, port: int, trainer: subprocess.Popen[Any]) -> None:
    """Ask from a host: the trainer listens on the bridge."""
    probe = ["ip", "netns", "exec", host, sys.executable, "-S", "-c"]
    probe.append(f"import socket; socket.create_connection(('{SUBNET}.1', {port}), 1)")
    deadline = time.monotonic() + 60
    while subprocess.run(probe, capture_output=True, check=False).returncode:
        assert trainer.poll() is None, "the trainer ended"
        assert time.monotonic() < deadline
        time.sleep(0.5)


def wait_for_step(metrics: Path, step: int, trainer: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 120
    while not (metrics.exists() and any(m["step"] >= step for m in read_metrics(metrics))):
        assert trainer.poll() is None, "the trainer ended too soon"
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_three_hosts_train_and_one_that_is_cut_off_returns(hosts: list[str], tmp_path: Path) -> None:
    port = 20000 + os.getpid() % 20000
    environment = {**os.environ, "AGL_STORE_KEY": "k" * 32, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    server = {"AGL_SERVER_HOST": f"{SUBNET}.1", "AGL_SERVER_PORT": str(port)}
    run_dir = tmp_path / "run"
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(run_dir)], env={**environment, **server})
    runners: list[subprocess.Popen[Any]] = []
    try:
        wait_until_served(hosts[0], port, trainer)
        runners = [start_runner(host, port, tmp_path, environment) for host in hosts]
        wait_for_step(run_dir / "metrics.jsonl", 2, trainer)
        ip("link", "set", f"{TAG}v0", "down")
        cut_off = time.time()
        time.sleep(12)
        ip("link", "set", f"{TAG}v0", "up")
        returned = time.time()
        assert trainer.wait(200) == 0
    finally:
        for process in [*runners, trainer]:
            process.terminate()
        for process in [*runners, trainer]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
    logs = {host: (tmp_path / f"{host}.log").read_text() for host in hosts}
    assert [m["step"] for m in read_metrics(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    asyncio.run(check_store(run_dir, cut_off, returned, logs))


async def check_store(run_dir: Path, cut_off: float, returned: float, logs: dict[str, str]) -> None:
    store = SqliteLightningStore(run_dir / "store.db")
    try:
        rollouts = list(await store.query_rollouts(limit=-1))
        attempts = [a for r in rollouts for a in await store.query_attempts(r.rollout_id)]
        calls = await store.query_calls([r.rollout_id for r in rollouts])
    finally:
        await store.close()
    assert len(rollouts) == STEPS * TASKS * GROUP
    assert {r.status for r in rollouts} == {RolloutStatus.SUCCEEDED}, logs
    assert all(calls[r.rollout_id] for r in rollouts), "a rollout without its calls"
    done = [a for a in attempts if a.status is AttemptStatus.SUCCEEDED]
    assert len(done) == len(rollouts), "each was done exactly once"
    assert {a.outcome for a in done} <= {Outcome.OK, Outcome.TRUNCATED}
    by_worker = Counter(a.worker_id for a in done)
    assert len(by_worker) == 3, (by_worker, logs)
    meanwhile = {a.worker_id for a in attempts if cut_off + 1 < a.start_time < returned}
    away = set(by_worker) - meanwhile
    assert away, "one of the workers was away"
    back = [a for a in done if a.worker_id in away and a.start_time > returned]
    assert back, ("the host that was cut off works again", by_worker, logs)
    lost = [a for a in attempts if a.status is not AttemptStatus.SUCCEEDED]
    print(f"{dict(by_worker)}; {len(lost)} attempts handed out again; {len(back)} after the return")  # noqa: T201
