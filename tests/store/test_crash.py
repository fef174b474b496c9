"""kill -9 at random moments under load: nothing acknowledged is missing, nothing is finished twice, the rest is handed
out again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentlightning.store import LightningStoreClient, SqliteLightningStore
from agentlightning.types import AttemptStatus, RolloutStatus
from tests.store.builders import make_call, make_segment, make_span

CLIENTS = """
import asyncio, sys
from agentlightning.store import SqliteLightningStore
from agentlightning.types import AttemptStatus
from tests.store.builders import make_call, make_segment, make_span

async def client(store, name):
    number = 0
    while True:
        task = f"{name}-{number}"
        await store.enqueue_rollout(task, rollout_id=task)
        print("enqueued", task, flush=True)
        claim = await store.dequeue_rollout(name)
        if claim is None:
            continue
        await store.add_span(make_span(claim))
        print("span", claim.attempt.attempt_id, claim.rollout_id, flush=True)
        segments = make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, [3], 1)
        await store.add_calls([make_call(claim, "c", "p", "r", *segments)])
        print("call", claim.attempt.attempt_id, claim.rollout_id, flush=True)
        await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
        print("finished", claim.attempt.attempt_id, claim.rollout_id, flush=True)
        number += 1

async def main():
    store = SqliteLightningStore(sys.argv[1])
    await asyncio.gather(*[client(store, f"{sys.argv[2]}w{n}") for n in range(8)])

asyncio.run(main())
"""

SERVER = """
import asyncio, sys
from agentlightning.store import LightningStoreServer, SqliteLightningStore
store = SqliteLightningStore(sys.argv[1], watchdog_seconds=0.1)
asyncio.run(LightningStoreServer(store, port=int(sys.argv[2])).run_forever())
"""


def _start(code: str, *arguments: str, output: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=output, text=True)


async def _crash(path: Path, life: int) -> list[list[str]]:
    """Run clients for a moment, every second time until something is finished, kill them, and return what they were
    told is stored."""
    process = _start(CLIENTS, str(path), f"life{life}")
    assert process.stdout is not None
    first = line = await asyncio.to_thread(process.stdout.readline)
    while life % 2 and line and not line.startswith("finished"):
        line = await asyncio.to_thread(process.stdout.readline)
        first += line
    await asyncio.sleep(random.uniform(0.0, 0.4))
    process.send_signal(signal.SIGKILL)
    rest, _ = await asyncio.to_thread(process.communicate)
    # The last line may have been cut off in the middle.
    lines = (first + rest).split("\n")[:-1]
    return [line.split() for line in lines]


async def _check(path: Path, told: list[list[str]]) -> int:
    """Everything that was acknowledged is there, and what is unfinished can be claimed again."""
    store = SqliteLightningStore(path)
    stored = {r.rollout_id: r for r in await store.query_rollouts(limit=-1)}
    calls = await store.query_calls(list(stored), latest_attempt_only=False)
    spans = {rollout_id: await store.query_spans(rollout_id) for rollout_id in {line[-1] for line in told}}
    for what, *attempt, rollout_id in told:
        assert rollout_id in stored
        if what == "span":
            assert attempt[0] in {span.attempt_id for span in spans[rollout_id]}
        elif what == "call":
            (call,) = [call for call in calls[rollout_id] if call.info.attempt_id == attempt[0]]
            assert call.response_ids.tolist() == [3]
        elif what == "finished":
            assert stored[rollout_id].status is RolloutStatus.SUCCEEDED
    finished = Counter(line[-1] for line in told if line[0] == "finished")
    assert all(count == 1 for count in finished.values())
    statistics = await store.statistics()
    assert statistics["total_rollouts"] == len(stored)
    assert statistics["rollouts"]["succeeded"] == sum(r.status is RolloutStatus.SUCCEEDED for r in stored.values())
    assert statistics["total_calls"] == sum(len(of_one) for of_one in calls.values())
    for rollout in stored.values():
        if rollout.status in (RolloutStatus.PREPARING, RolloutStatus.RUNNING):
            await store.update_rollout(rollout.rollout_id, status=RolloutStatus.REQUEUING)
    await store.close()
    return len(stored)


@pytest.mark.parametrize("lives", [2, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_killing_the_process_of_the_store(tmp_path: Path, lives: int) -> None:
    told: list[list[str]] = []
    for life in range(lives):
        told += await _crash(tmp_path / "store.db", life)
        await _check(tmp_path / "store.db", told)
    assert sum(line[0] == "finished" for line in told) >= lives // 2


class Server:
    """A process that serves the store, to be killed and started again."""

    def __init__(self, path: Path, port: int):
        self._arguments = (str(path), str(port))
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return _start(SERVER, *self._arguments, output=subprocess.DEVNULL)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._process = self._start()


async def _work(store: LightningStoreClient, name: str, tasks: int, done: Counter[str]) -> None:
    """A runner: until all tasks are done."""
    while done.total() < tasks:
        claim = await store.dequeue_rollout(name, timeout=0.5)
        if claim is None:
            continue
        await store.add_span(make_span(claim))
        segments = make_segment("p", None, 0, [1]), make_segment("r", "p", 1, [2], 1)
        await store.add_calls([make_call(claim, "c", "p", "r", *segments)])
        await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
        done[claim.rollout_id] += 1


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(15, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_killing_the_server_under_its_clients(tmp_path: Path, unused_tcp_port: int, kills: int) -> None:
    """Clients of a server that is killed again and again notice nothing but a pause; every task is done once."""
    server = Server(tmp_path / "store.db", unused_tcp_port)
    store = LightningStoreClient(f"http://127.0.0.1:{unused_tcp_port}", retry_seconds=60)
    tasks = 60 * kills
    done: Counter[str] = Counter()
    runners = asyncio.gather(*[_work(store, f"w{n}", tasks, done) for n in range(4)])
    try:
        producer = asyncio.gather(*[store.enqueue_rollout(n, rollout_id=f"task{n}") for n in range(tasks)])
        for _ in range(kills):
            await store.statistics()  # it is up
            await asyncio.sleep(random.uniform(0.0, 0.4))
            await asyncio.to_thread(server.restart)
        ids = [rollout.rollout_id for rollout in await producer]
        await asyncio.wait_for(runners, 300)
        finished = await store.wait_for_rollouts(rollout_ids=ids, timeout=5)
        assert {rollout.status for rollout in finished} == {RolloutStatus.SUCCEEDED}
        assert done == Counter(ids)
        statistics = await store.statistics()
        assert (statistics["total_rollouts"], statistics["total_attempts"]) == (tasks, tasks)
        assert (statistics["total_calls"], statistics["total_spans"]) == (tasks, 2 * tasks)
    finally:
        await store.close()
        await asyncio.to_thread(server.kill)
