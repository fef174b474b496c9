"""kill -9 of runners, the algorithm and the store server in turn, at random moments: every task ends exactly once."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentlightning.store import LightningStoreClient
from agentlightning.types import AttemptStatus, RolloutStatus
from agentlightning.types.reward import find_final_reward

SERVER = """
import asyncio, sys
from agentlightning.store import LightningStoreServer, SqliteLightningStore
store = SqliteLightningStore(sys.argv[1], watchdog_seconds=0.1)
asyncio.run(LightningStoreServer(store, port=int(sys.argv[2])).run_forever())
"""

RUNNER = """
import asyncio, random, sys
import agentlightning as agl
from agentlightning.runner import LitAgentRunner
from agentlightning.store import LightningStoreClient
from agentlightning.tracer import OtelTracer

@agl.rollout
async def agent(task):
    await asyncio.sleep(random.uniform(0, 0.05))
    agl.emit_message(f"worked on {task}")
    return float(task)

async def main():
    runner = LitAgentRunner(OtelTracer(), concurrency=4)
    runner.init(agent)
    runner.init_worker(0, LightningStoreClient(sys.argv[1], retry_seconds=60))
    await runner.iter()

asyncio.run(main())
"""

ALGORITHM = """
import asyncio, sys
from agentlightning.store import LightningStoreClient
from agentlightning.types import EnqueueRolloutRequest, RolloutConfig

STEPS, SIZE = int(sys.argv[2]), 8

async def main():
    store = LightningStoreClient(sys.argv[1], retry_seconds=60)
    config = RolloutConfig(unresponsive_seconds=1.0)
    for step in range(STEPS):
        ids = [f"task{step * SIZE + n}" for n in range(SIZE)]
        await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=int(i[4:]), rollout_id=i, config=config) for i in ids]
        )
        await store.wait_for_rollouts(rollout_ids=ids)
    await store.close()

asyncio.run(main())
"""


class Process:
    """A process of one role, to be killed and started again."""

    def __init__(self, code: str, *arguments: str):
        self._command = [sys.executable, "-c", code, *arguments]
        self._process = subprocess.Popen(self._command)

    def restart(self) -> None:
        self.kill()
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("steps", "kills"), [(25, 25)])
async def test_killing_every_role_in_turn(tmp_path: Path, unused_tcp_port: int, steps: int, kills: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    server = Process(SERVER, str(tmp_path / "store.db"), str(unused_tcp_port))
    store = LightningStoreClient(url, retry_seconds=60)
    algorithm, *runners = Process(ALGORITHM, url, str(steps)), Process(RUNNER, url), Process(RUNNER, url)
    roles = [algorithm, *runners, server]
    try:
        await store.statistics()
        for number in range(kills):
            await asyncio.sleep(random.uniform(0.5, 2.0))
            await asyncio.to_thread(roles[number % len(roles)].restart)
        assert await asyncio.to_thread(algorithm.wait, 300) == 0
        await _check(store, steps * 8)
    finally:
        await store.close()
        for process in roles:
            process.kill()


async def _check(store: LightningStoreClient, tasks: int) -> None:
    found = await store.query_rollouts(limit=-1)
    assert Counter(r.rollout_id for r in found) == Counter(f"task{n}" for n in range(tasks))
    assert {r.status for r in found} == {RolloutStatus.SUCCEEDED}
    for rollout in found:
        attempts = await store.query_attempts(rollout.rollout_id)
        ended = [a for a in attempts if a.status is AttemptStatus.SUCCEEDED]
        assert len(ended) == 1
        spans = await store.query_spans(rollout.rollout_id, ended[0].attempt_id)
        assert find_final_reward(list(spans)) == float(rollout.input)
        assert len({span.span_id for span in spans}) == len(spans)
