"""What a runner costs: hundreds of async rollouts at once in one process, against a slow engine; sync ones too.

Each agent makes two model calls, each of which the engine (a process of its own) answers after DELAY seconds with what
it was sent, and emits an annotation and a reward. The runner's cost is the CPU time of the whole process, store and
tracer included, less that of the same agents run by `asyncio.gather`. Every rollout is then read back: spans that
belong to another one, and wrong rewards, are counted as cross-talk.
    python benchmarks/runner.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import os
import threading
import time
import urllib.request
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import aiohttp
import psutil
from opentelemetry import trace as otel_trace

import agentlightning as agl
from agentlightning.runner import LitAgentRunner
from agentlightning.runner.executor import agent_loop
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import LLM, EnqueueRolloutRequest
from agentlightning.types.reward import find_final_reward

DELAY = 1.0
CALLS = 2

# ---- the slow engine, in a process of its own ----------------------------------------------------------------------


def serve_engine(delay: float, told: Connection) -> None:
    asyncio.run(_serve_engine(delay, told))


async def _serve_engine(delay: float, told: Connection) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                at = head.lower().index(b"content-length:") + 15
                body = await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))
                await asyncio.sleep(delay)
                size = str(len(body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " + size)
                writer.write(b"\r\n\r\n" + body)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(client, "127.0.0.1", 0, backlog=4096)
    told.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


# ---- the agents ----------------------------------------------------------------------------------------------------

_session: aiohttp.ClientSession | None = None


def session() -> aiohttp.ClientSession:
    """One for all rollouts, as agents should do it; it belongs to the loop of the agents."""
    global _session
    if _session is None:
        _session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    return _session


async def work(task: int, llm: agl.LLM) -> float:
    """Two calls one after the other; each must come back with the number of this task."""
    tracer = otel_trace.get_tracer("benchmark")
    for number in range(CALLS):
        with tracer.start_as_current_span("call", attributes={"task": task, "number": number}):
            async with session().post(llm.endpoint, json={"task": task, "number": number}) as response:
                answer = await response.json()
        if answer != {"task": task, "number": number}:
            return -1.0
    return float(task)


def work_in_thread(task: int, llm: agl.LLM) -> float:
    body = json.dumps({"task": task}).encode()
    for _ in range(CALLS):
        with urllib.request.urlopen(urllib.request.Request(llm.endpoint, body)) as response:
            if json.load(response) != {"task": task}:
                return -1.0
    return float(task)


@agl.rollout
async def async_agent(task: int, llm: agl.LLM) -> float:
    reward = await work(task, llm)
    agl.emit_annotation({"task": task})
    return reward


@agl.rollout
def sync_agent(task: int, llm: agl.LLM) -> float:
    reward = work_in_thread(task, llm)
    agl.emit_annotation({"task": task})
    return reward


# ---- measuring -----------------------------------------------------------------------------------------------------


class Peak:
    """The process's largest memory while the block runs, above what it was before."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._process = psutil.Process()
        self.before = self.highest = self._process.memory_info().rss
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.highest = max(self.highest, self._process.memory_info().rss)

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mb(self) -> float:
        return (self.highest - self.before) / 2**20


async def by_runner(agent: Any, count: int, concurrency: int, endpoint: str) -> dict[str, Any]:
    """Run `count` rollouts; what they cost, and how many show something of another rollout."""
    store = InMemoryLightningStore()
    await store.add_resources({"llm": LLM(endpoint=endpoint, model="slow")})
    runner = LitAgentRunner(OtelTracer(), max_rollouts=count, concurrency=concurrency)
    runner.init(agent)
    runner.init_worker(0, store)
    asked = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(count)])
    with Peak() as peak:
        cpu, began = time.process_time(), time.perf_counter()
        await runner.iter()
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    runner.teardown()
    wrong = 0
    for number, rollout in enumerate(asked):
        spans = list(await store.query_spans(rollout.rollout_id))
        of = {s.attributes["task"] for s in spans if "task" in s.attributes}
        wrong += of != {number} or find_final_reward(spans) != float(number)
    await store.close()
    return {"cpu_s": cpu, "wall_s": wall, "rss_mb": peak.mb, "cross_talk": wrong}


async def alone(function: Callable[[int, agl.LLM], Awaitable[float]], count: int, concurrency: int, url: str) -> float:
    """CPU seconds of the same agents without a runner, as many at once."""
    llm, free = LLM(endpoint=url, model="slow"), asyncio.Semaphore(concurrency)

    async def one(task: int) -> None:
        async with free:
            await function(task, llm)

    cpu = time.process_time()
    await asyncio.gather(*(one(n) for n in range(count)))
    return time.process_time() - cpu


async def main(quick: bool, as_json: bool) -> None:
    count, concurrency, sync_count, sync_concurrency = (1000, 500, 128, 64) if quick else (4000, 500, 512, 64)
    told, tell = multiprocessing.Pipe(duplex=False)
    engine = multiprocessing.get_context("spawn").Process(target=serve_engine, args=(DELAY, tell), daemon=True)
    engine.start()
    url = f"http://127.0.0.1:{told.recv()}/v1"
    try:
        await by_runner(async_agent, 50, 50, url)  # imports and first connections
        many = await by_runner(async_agent, count, concurrency, url)
        sync = await by_runner(sync_agent, sync_count, sync_concurrency, url)
        bare = await asyncio.to_thread(lambda: asyncio.run(_alone(count, concurrency, url)))
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(sync_concurrency))
        bare_sync = await alone(
            lambda task, llm: asyncio.to_thread(work_in_thread, task, llm), sync_count, sync_concurrency, url
        )
        await agent_loop().run(session().close())
    finally:
        engine.terminate()
        engine.join()
    result = {
        "cpu_ms_per_rollout": round(1e3 * (many["cpu_s"] - bare) / count, 3),
        "rss_mb": round(many["rss_mb"], 1),
        "wall_s": round(many["wall_s"], 2),
        "ideal_wall_s": round(CALLS * DELAY * -(-count // concurrency), 2),
        "agent_cpu_ms_per_rollout": round(1e3 * bare / count, 3),
        "cross_talk": many["cross_talk"] + sync["cross_talk"],
        "rollouts": count,
        "concurrency": concurrency,
        "sync_cpu_ms_per_rollout": round(1e3 * (sync["cpu_s"] - bare_sync) / sync_count, 3),
        "sync_wall_s": round(sync["wall_s"], 2),
        "sync_ideal_wall_s": round(CALLS * DELAY * -(-sync_count // sync_concurrency), 2),
        "sync_rss_mb": round(sync["rss_mb"], 1),
    }
    print(f"{'':36}{'async':>10}{'sync':>10}")
    print(f"{'rollouts':36}{count:>10}{sync_count:>10}")
    print(f"{'at once':36}{concurrency:>10}{sync_concurrency:>10}")
    print(f"{'CPU of the runner, ms per rollout':36}{result['cpu_ms_per_rollout']:>10}", end="")
    print(f"{result['sync_cpu_ms_per_rollout']:>10}")
    print(f"{'wall clock, s':36}{result['wall_s']:>10}{result['sync_wall_s']:>10}")
    print(f"{'wall clock if it cost nothing, s':36}{result['ideal_wall_s']:>10}{result['sync_ideal_wall_s']:>10}")
    print(f"{'memory above the start, MiB':36}{result['rss_mb']:>10}{result['sync_rss_mb']:>10}")
    print(f"rollouts with something of another: {result['cross_talk']}; on {os.cpu_count()} cores")
    if as_json:
        print(json.dumps(result))


async def _alone(count: int, concurrency: int, url: str) -> float:
    global _session
    kept, _session = _session, None
    try:
        return await alone(work, count, concurrency, url)
    finally:
        await session().close()
        _session = kept


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute, at smaller sizes")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    given = parser.parse_args()
    asyncio.run(main(given.quick, given.json))
