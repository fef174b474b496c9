"""A team's load on one machine: thousands of simulated agents on one PostgreSQL, two gateways and a slow engine.

1,000 runners with 10 rollouts each are at work at once. A rollout makes one model call (100 tokens in, 64 out, with
log-probs), which the engine answers after 1 to 30 s. PostgreSQL is durable; the store's server, the gateways and the
runners are processes of their own, the runners in a few processes. In the end the store is asked whether every rollout
succeeded, with its call and its reward, and how many were attempted more than once.
    python benchmarks/scale.py [--runners 1000] [--rollouts 20000] [--answer 1 30] [--quick] [--json]

Keys: `rollouts_per_s`, `claim_p50_ms` and `claim_p99_ms` (of requests that claimed something, as a runner waits for
them), `cpu_ms_…` per rollout of PostgreSQL, of the store's server, of the gateways and of the runners with their
agents, `lost` (rollouts without success, or without their call or reward), `again` (rollouts that took more than one
attempt), `given_up_…` (attempts that did not succeed, by what became of them), `most_at_once`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import uvloop

ROOT = Path(__file__).parents[1]
KEY = "the key of this benchmark"
EVERY = 5.0
PER_RUNNER = 10
GATEWAYS = 2
PROMPT = "How far is it from one end of the town to the other, if one takes the road along the river? " * 4

# ---- the parts, each in processes of its own -------------------------------------------------------------------------


class Slow:
    """An engine that answers with 64 tokens after a while."""

    def __init__(self, rendering: Any, answer: Sequence[float]) -> None:
        import numpy as np

        from agentlightning.engine.base import EngineInfo

        ids = [*(rendering.encode("It is far. ") * 40)[:63], rendering.stop_token_ids[0]]
        self._ids = np.array(ids, dtype=np.int32)
        self._logprobs = np.linspace(-0.1, -2, len(ids)).astype(np.float32)
        self._answer = answer
        self._info = EngineInfo(
            model="slow", max_context=4096, max_concurrency=100_000, vocab_size=1000, eos_ids=(ids[-1],), version=0
        )

    async def info(self) -> Any:
        return self._info

    async def generate(
        self, prompt_ids: Any, params: Any, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        from agentlightning.engine.base import Chunk

        await asyncio.sleep(random.uniform(*self._answer))
        yield Chunk(
            ids=self._ids, logprobs=self._logprobs, plain_logprobs=self._logprobs, version=0, finish_reason="stop"
        )


async def be_a_gateway(spec: dict[str, Any]) -> None:
    from agentlightning.gateway import Gateway
    from agentlightning.keys import derived_secret
    from agentlightning.models import resolve_model
    from agentlightning.rendering import load_rendering
    from agentlightning.store import PostgresLightningStore

    rendering = load_rendering(resolve_model("calc"))
    store = PostgresLightningStore(spec["dsn"])
    gateway = Gateway(store, Slow(rendering, spec["answer"]), rendering, secret=derived_secret(KEY))
    await gateway.start()
    say(gateway.as_resource().model_dump_json())
    await asyncio.Event().wait()


async def be_the_store(spec: dict[str, Any]) -> None:
    from agentlightning.keys import derived_secret
    from agentlightning.store import LightningStoreServer, PostgresLightningStore

    server = LightningStoreServer(PostgresLightningStore(spec["dsn"]), admin_key=KEY, secret=derived_secret(KEY))
    await server.start()
    say(server.endpoint)
    await asyncio.Event().wait()


async def be_runners(spec: dict[str, Any]) -> None:
    """Some of the runners, with an agent that asks one of the gateways once; says how long each claim took."""
    import aiohttp

    import agentlightning as agl
    from agentlightning.runner import LitAgentRunner
    from agentlightning.runner.remote import Address, RemoteGateway
    from agentlightning.store import LightningStoreClient
    from agentlightning.tracer import DummyTracer

    sessions: list[aiohttp.ClientSession] = []

    @agl.rollout
    async def agent(task: Any, resources: Any) -> float:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        llm = resources[f"llm{task['gateway']}"]
        body = {"model": llm.model, "messages": [{"role": "user", "content": f"{PROMPT}{task['number']}"}]}
        headers = {"Authorization": f"Bearer {llm.api_key}"}
        url = f"{llm.endpoint}/chat/completions"
        async with sessions[0].post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        return float(task["number"])

    class Timed(LightningStoreClient):
        """Says how long it took to claim something."""

        async def dequeue_many_rollouts(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = await super().dequeue_many_rollouts(*args, **kwargs)
            if found:
                claims.append(time.perf_counter() - began)
            return found

    claims: list[float] = []
    store, gateway = Timed(spec["store"], key=KEY), RemoteGateway(Address(spec["store"], KEY))

    async def one(number: int) -> None:
        runner = LitAgentRunner(DummyTracer(), concurrency=PER_RUNNER, gateway=gateway)
        runner.init(agent)
        runner.init_worker(number, store)
        await runner.iter()

    async def tell() -> None:
        while True:
            await asyncio.sleep(EVERY)
            say(json.dumps(claims))
            claims.clear()

    await asyncio.gather(tell(), *(one(spec["first"] + n) for n in range(spec["count"])))


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# ---- measuring -------------------------------------------------------------------------------------------------------


class Part:
    """A process of the benchmark."""

    def __init__(self, role: str, folder: Path, **spec: Any) -> None:
        command = [sys.executable, __file__, "--role", role, "--spec", json.dumps(spec)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._log = folder / f"{role}.log"
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        self.heard: list[float] = []

    def line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"A part of the benchmark ended:\n{self._log.read_text()[-2000:]}")
        return line

    def listen(self) -> None:
        """Collect what it says of its claims, for as long as it lives."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.heard += json.loads(line)

    def cpu(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def cpu_of_postgres() -> float:
    """Of all its processes, those that ended included as far as their parents counted them."""
    total = 0.0
    for process in psutil.process_iter(["name", "cpu_times"]):
        if process.info["name"] == "postgres" and process.info["cpu_times"] is not None:
            times = process.info["cpu_times"]
            total += times.user + times.system
    return total


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


class Crowd:
    """All parts, what is asked of them, and how far they are."""

    def __init__(self, given: argparse.Namespace, folder: Path, dsn: str, stack: ExitStack) -> None:
        self._given, self._folder, self._dsn, self._stack = given, folder, dsn, stack
        self.parts: dict[str, list[Part]] = {
            "store": [self._start("store")],
            "gateways": [self._start("gateway") for _ in range(GATEWAYS)],
        }
        self.address = self.parts["store"][0].line()
        self._resources = [json.loads(part.line()) for part in self.parts["gateways"]]
        self.rows: list[tuple[float, int]] = []
        self.most_at_once = 0

    def _start(self, role: str, **more: Any) -> Part:
        part = Part(role, self._folder, dsn=self._dsn, answer=self._given.answer, **more)
        self._stack.callback(part.end)
        return part

    def start_runners(self) -> None:
        each = -(-self._given.runners // self._given.processes)
        counts = [min(each, self._given.runners - first) for first in range(0, self._given.runners, each)]
        self.parts["runners"] = [
            self._start("runners", store=self.address, first=n * each, count=count) for n, count in enumerate(counts)
        ]
        for part in self.parts["runners"]:
            threading.Thread(target=part.listen, daemon=True).start()

    def cpu(self) -> dict[str, float]:
        return {"postgres": cpu_of_postgres(), **{k: sum(p.cpu() for p in parts) for k, parts in self.parts.items()}}

    async def work(self, store: Any) -> dict[str, float]:
        """Have all rollouts done; CPU seconds of each kind of part from the first claim to the end."""
        from agentlightning.types import EnqueueRolloutRequest, ProxyLLM

        total = self._given.rollouts
        await store.add_resources({f"llm{n}": ProxyLLM(**llm) for n, llm in enumerate(self._resources)})
        for first in range(0, total, 500):
            numbers = range(first, min(first + 500, total))
            tasks = [EnqueueRolloutRequest(input={"number": n, "gateway": n % GATEWAYS}) for n in numbers]
            await store.enqueue_many_rollouts(tasks)
        print(f"{total:,} rollouts are queued; {self._given.runners:,} runners with {PER_RUNNER} at once begin")
        print(f"{'s':>6}{'done':>10}{'at once':>10}{'/s':>8}{'claims: p50':>14}{'p99 ms':>10}")
        self.start_runners()
        before, began, seen = {**self.cpu(), "runners": 0.0}, time.perf_counter(), (0.0, 0)
        while seen[1] < total:
            await asyncio.sleep(EVERY)
            seen = await self._row(store, time.perf_counter() - began, seen)
        return {name: seconds - before[name] for name, seconds in self.cpu().items()}

    async def _row(self, store: Any, now: float, last: tuple[float, int]) -> tuple[float, int]:
        counted = await store.statistics()
        by = counted["rollouts"]
        done = sum(by.get(status, 0) for status in ("succeeded", "failed", "cancelled"))
        at_once = sum(by.get(status, 0) for status in ("preparing", "running"))
        self.most_at_once = max(self.most_at_once, at_once)
        if done:
            self.rows.append((now, done))
        heard = self.claims
        rate = (done - last[1]) / (now - last[0])
        p50, p99 = percentile(heard, 0.5) * 1e3, percentile(heard, 0.99) * 1e3
        print(f"{now:6.0f}{done:10,}{at_once:10,}{rate:8.1f}{p50:14.0f}{p99:10.0f}", flush=True)
        return now, done

    @property
    def claims(self) -> list[float]:
        return [seconds for part in self.parts["runners"] for seconds in part.heard]


async def wrong(store: Any, total: int) -> dict[str, int]:
    """Rollouts that did not succeed with a call and the reward of their task, and those that were attempted again."""
    from agentlightning.types.reward import find_final_reward

    good, again, cursor = 0, 0, None
    given_up: Counter[str] = Counter()
    while True:
        page = await store.query_rollouts(limit=500, cursor=cursor)
        for record in await store.query_records([rollout.rollout_id for rollout in page]):
            rollout, attempt = record.rollout, record.attempt
            reward = find_final_reward(list(record.spans))
            done = rollout.status == "succeeded" and len(record.calls) == 1
            good += done and reward == float(rollout.input["number"])
            if attempt is not None and attempt.sequence_id > 1:
                again += 1
                attempts = await store.query_attempts(rollout.rollout_id)
                given_up.update(f"given_up_{a.status}" for a in attempts.items if a.status != "succeeded")
        cursor = page.next_cursor
        if cursor is None:
            return {"lost": total - good, "again": again, **given_up}


async def main(given: argparse.Namespace) -> None:
    from agentlightning.store import PostgresLightningStore
    from tests.store.postgres_server import find_binaries, postgres_server

    binaries = find_binaries()
    if binaries is None:
        raise SystemExit("PostgreSQL is not installed (Debian and Ubuntu: apt-get install postgresql).")
    with TemporaryDirectory(ignore_cleanup_errors=True) as name, ExitStack() as stack:
        dsn = stack.enter_context(postgres_server(binaries, durable=True))
        store = PostgresLightningStore(dsn)
        crowd = Crowd(given, Path(name), dsn, stack)
        cpu = await crowd.work(store)
        figures = {
            "rollouts_per_s": rate_of(crowd.rows),
            "claim_p50_ms": percentile(crowd.claims, 0.5) * 1e3,
            "claim_p99_ms": percentile(crowd.claims, 0.99) * 1e3,
            **{f"cpu_ms_{name}": 1e3 * seconds / given.rollouts for name, seconds in cpu.items()},
            "most_at_once": crowd.most_at_once,
            **await wrong(store, given.rollouts),
        }
        await store.close()
    for key, value in figures.items():
        print(f"{key:20}{value:12,.1f}")
    print(f"{os.cpu_count()} cores; load of the machine over the last minutes: {os.getloadavg()[1]:.1f}")
    if given.json:
        print(json.dumps({key: round(value, 2) for key, value in figures.items()}))


def rate_of(rows: Sequence[tuple[float, int]]) -> float:
    """Rollouts per second from the first that were done to the last."""
    (began, first), (ended, last) = rows[0], rows[-1]
    return (last - first) / (ended - began) if ended > began else last / ended


ROLES = {"gateway": be_a_gateway, "store": be_the_store, "runners": be_runners}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runners", type=int, default=1000, help=f"each with {PER_RUNNER} rollouts at once")
    parser.add_argument("--rollouts", type=int, default=20_000)
    parser.add_argument("--processes", type=int, default=4, help="that the runners are in")
    parser.add_argument("--answer", type=float, nargs=2, default=(1.0, 30.0), help="seconds, from and to")
    parser.add_argument("--quick", action="store_true", help="100 runners, 2,000 rollouts, answers after 0.1 to 3 s")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--spec", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if given.quick:
        given.runners, given.rollouts, given.processes, given.answer = 100, 2000, 2, (0.1, 3.0)
    sys.path.insert(0, str(ROOT))
    uvloop.run(ROLES[given.role](given.spec) if given.role else main(given))
