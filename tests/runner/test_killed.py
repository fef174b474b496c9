"""A runner's process that is killed: what it had claimed is given back soon after its connection ended."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.http import api
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig

AGENT = """
import asyncio
import agentlightning as agl

@agl.rollout
async def agent(task: int) -> float:
    await asyncio.sleep(3600)
    return 0.0
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("runners", [1, 2])
async def test_a_killed_runner_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runners: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(api, "_QUIET_SECONDS", 0.5)
    (tmp_path / "an_agent.py").write_text(AGENT)
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, port=0, admin_key="key")
    await server.start()
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(4 * runners)])
    command = ["-m", "agentlightning", "runner", "--server", server.endpoint, "--agent", "an_agent.py:agent"]
    environment = {**os.environ, "AGL_STORE_KEY": "key"}
    processes = [
        subprocess.Popen(  # noqa: ASYNC220 - it is not waited for
            [sys.executable, *command, "--concurrency", "4"], cwd=tmp_path, env=environment
        )
        for _ in range(runners)
    ]
    try:
        await until(store, [r.rollout_id for r in rollouts], "preparing")
        held = [r.rollout_id for r in rollouts if (a := await store.get_latest_attempt(r.rollout_id)) and a.worker_id]
        processes[0].send_signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            while sum([(await store.get_latest_attempt(i)).status == "unresponsive" for i in held]) < 4:  # pyright: ignore  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        states = [(await store.get_latest_attempt(i)).status for i in held]  # pyright: ignore
        assert [str(s) for s in states].count("unresponsive") == 4, "those of its neighbours go on"
        assert caplog.text.count("are handed out again") == 1
    finally:
        for process in processes:
            process.kill()
            process.wait()
        await server.stop()
        await store.close()


async def until(store: InMemoryLightningStore, ids: list[str], status: str) -> None:
    async with asyncio.timeout(30):
        while {(await store.get_rollout_by_id(i)).status for i in ids} != {status}:  # pyright: ignore  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.fixture
def machine() -> Iterator[str]:
    """A network namespace, which the store's server is reached from at 10.231.7.1; its name."""
    if sys.platform != "linux" or os.geteuid() or shutil.which("ip") is None:
        pytest.skip("a machine of its own is made by ip netns, as root")
    name = f"agl{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("there are no network namespaces here")
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", "10.231.7.1/30", "dev", name)
        ip("link", "set", name, "up")
        for words in ("addr add 10.231.7.2/30 dev eth0", "link set eth0 up", "link set lo up"):
            ip("-n", name, *words.split())
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_runner_whose_machine_vanishes_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    """Its connection never ends: only the server's own system can find that out, long before the lease is over."""
    monkeypatch.setattr(api, "_QUIET_SECONDS", 0.5)
    (tmp_path / "an_agent.py").write_text(AGENT)
    store = InMemoryLightningStore()
    server = LightningStoreServer(store, host="10.231.7.1", port=0, admin_key="key")
    await server.start()
    config = RolloutConfig(unresponsive_seconds=3600.0)
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, config=config) for n in range(4)])
    command = ["-m", "agentlightning", "runner", "--server", server.endpoint, "--agent", "an_agent.py:agent"]
    process = subprocess.Popen(  # noqa: ASYNC220 - it is not waited for
        ["ip", "netns", "exec", machine, sys.executable, *command, "--concurrency", "4"],
        cwd=tmp_path,
        env={**os.environ, "AGL_STORE_KEY": "key"},
    )
    try:
        await until(store, [r.rollout_id for r in rollouts], "preparing")
        ip("-n", machine, "link", "set", "eth0", "down")
        async with asyncio.timeout(80):
            for rollout in rollouts:
                while (await store.get_latest_attempt(rollout.rollout_id)).status != "unresponsive":  # pyright: ignore  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
    finally:
        process.kill()
        process.wait()
        await server.stop()
        await store.close()
