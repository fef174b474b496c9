"""A runner's process that is killed: what it had claimed is given back soon after its connection ended."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.http import attendance
from agentlightning.types import EnqueueRolloutRequest

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
    monkeypatch.setattr(attendance, "QUIET_SECONDS", 0.5)
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
