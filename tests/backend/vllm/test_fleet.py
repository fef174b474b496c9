"""vLLM servers of ours: started, kept alive, replaced when they die, and gone when we are."""
# ruff: noqa: ASYNC110, ASYNC220, ASYNC240 - small files, processes and waits of a test

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from agentlightning.backend.counters import Seeds
from agentlightning.backend.fleet import Fleet
from agentlightning.backend.vllm.engine import VLLMEngine, VLLMSampling
from agentlightning.backend.vllm.process import ServerProcess, free_port
from agentlightning.backend.vllm.publication import Gate, SharedFolder, WeightsPublication
from agentlightning.backend.vllm.replica import Launch, Replica
from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams, concat
from agentlightning.errors import BackendDied, EngineError

FAKE = str(Path(__file__).with_name("fake.py"))
PROMPT = np.arange(1, 9, dtype=np.int32)
INFO = EngineInfo(model="m", max_context=512, max_concurrency=8, vocab_size=64, eos_ids=(63,), version=3)


async def no_export(policy: str, path: str) -> None:
    Path(path).mkdir(parents=True)


def is_there(group: int) -> bool:
    """Whether a process of the group lives."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


class Servers:
    """A fleet of fake servers with an engine on it."""

    def __init__(self, tmp_path: Path, count: int, restarts: int, **environment: str) -> None:
        self.gate = Gate()
        self.publication = WeightsPublication(SharedFolder(tmp_path / "weights", no_export), self.gate, 3)
        launches = [self._launch(tmp_path / f"{n}.log", environment) for n in range(count)]
        self.fleet = Fleet(
            [
                Replica(
                    f"server {n}",
                    "http://127.0.0.1",
                    launch=launch,
                    bring=self.publication.bring,
                    start_seconds=100,
                    restarts=restarts,
                )
                for n, launch in enumerate(launches)
            ],
            INFO.max_concurrency,
        )
        shared = VLLMSampling(
            fleet=self.fleet,
            gate=self.gate,
            publication=self.publication,
            in_flight="finish",
            info=INFO,
            seeds=Seeds(0),
        )
        self.engine = VLLMEngine("policy", shared, 3)

    def _launch(self, log: Path, environment: dict[str, str]) -> Launch:
        async def launch() -> tuple[str, ServerProcess]:
            port = free_port()
            command = [sys.executable, FAKE, "serve", "m", "--port", str(port)]
            return f"http://127.0.0.1:{port}", await ServerProcess.start(command, {**os.environ, **environment}, log)

        return launch

    async def sample(self, owner: str = "", tokens: int = 4) -> Chunk:
        params = SamplingParams(max_tokens=tokens, owner=owner)
        return concat([chunk async for chunk in self.engine.generate(PROMPT, params)])


@asynccontextmanager
async def running(tmp_path: Path, count: int = 1, restarts: int = 3, **environment: str) -> AsyncIterator[Servers]:
    servers = Servers(tmp_path, count, restarts, **environment)
    await servers.fleet.start()
    try:
        yield servers
    finally:
        await servers.fleet.close()


@pytest.mark.slow
async def test_a_server_that_is_killed_costs_its_calls_a_second_try(tmp_path: Path) -> None:
    async with running(tmp_path, count=2) as servers:
        first = servers.fleet.replicas[0].process
        assert isinstance(first, ServerProcess)
        calls = [asyncio.create_task(servers.sample(f"attempt {n}", tokens=300)) for n in range(8)]
        while not servers.fleet.replicas[0].running:
            await asyncio.sleep(0)
        first.kill()
        chunks = await asyncio.gather(*calls)
        assert {chunk.version for chunk in chunks} == {3}
        while len(servers.fleet.ready) < 2:
            await asyncio.sleep(0.05)
        again = servers.fleet.replicas[0].process
        assert isinstance(again, ServerProcess)
        assert again.pid != first.pid
        version = await servers.sample("attempt 0")
        assert version.version == 3, "the new server got the current version before it sampled"


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    servers = Servers(tmp_path, 1, 3, FAKE_REFUSES="1")
    with pytest.raises(EngineError, match=r"exit code 1(.|\n)*this model is not for me(.|\n)*0\.log"):
        await servers.fleet.start()
    assert "this model is not for me" in (tmp_path / "0.log").read_text()


async def test_a_server_that_dies_while_it_is_started_again_is_started_once_more(tmp_path: Path) -> None:
    async with running(tmp_path) as servers:
        replica = servers.fleet.replicas[0]
        first = replica.process
        assert isinstance(first, ServerProcess)
        first.kill()
        while replica.process in (first, None):
            await asyncio.sleep(0)
        second = replica.process
        assert isinstance(second, ServerProcess)
        assert not replica.ready.is_set()
        second.kill()
        assert (await servers.sample()).version == 3
        assert replica.process not in (first, second)


@pytest.mark.slow
async def test_servers_that_die_again_and_again_end_the_run(tmp_path: Path) -> None:
    async with running(tmp_path, restarts=1, FAKE_DIES_AFTER="0") as servers:
        with pytest.raises(BackendDied, match=r"out of luck(.|\n)*ended each time"):
            await servers.sample()
        with pytest.raises(BackendDied, match="out of luck"):
            await servers.fleet.watch()


@pytest.mark.parametrize("guarded", [True, False], ids=["alone", "with its child"])
async def test_a_server_does_not_outlive_this_process(tmp_path: Path, guarded: bool) -> None:
    """However it ends: here a process that holds a server is killed; and before it what it started, as Ray does."""
    code = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from agentlightning.backend.vllm.process import ServerProcess\n"
        "async def main():\n"
        f"    command = [sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(600)']\n"
        f"    server = await ServerProcess.start(command, dict(os.environ), Path({str(tmp_path / 'log')!r}))\n"
        "    print(server.pid, flush=True)\n"
        "    await server.ended\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    group = int(await asyncio.to_thread(holder.stdout.readline))
    while not (tmp_path / "log").read_text():
        await asyncio.sleep(0.05)
    if not guarded:
        os.kill(group, signal.SIGKILL)
    holder.kill()
    holder.wait()
    holder.stdout.close()
    while is_there(group):
        await asyncio.sleep(0.05)


async def test_calls_of_one_attempt_go_to_one_server(tmp_path: Path) -> None:
    async with running(tmp_path, count=2) as servers:
        picked = {(await servers.fleet.pick("attempt 1")).name for _ in range(5)}
        assert len(picked) == 1
        homes = {(await servers.fleet.pick(f"attempt {n}")).name for n in range(40)}
        assert len(homes) == 2
        busy = await servers.fleet.pick("attempt 1")
        busy.running += 10
        assert (await servers.fleet.pick("attempt 1")).name != busy.name
        busy.running -= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_server_that_stands_still_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path) as servers:
        process = servers.fleet.replicas[0].process
        assert isinstance(process, ServerProcess)
        os.killpg(process.pid, signal.SIGSTOP)
        assert len((await servers.sample()).ids) > 0
        again = servers.fleet.replicas[0].process
        assert isinstance(again, ServerProcess)
        assert again.pid != process.pid
