"""How fast the store is: life cycles per second in process and over HTTP, wide calls, growth, memory.

A life cycle is enqueue, claim, four model calls of 256 + 64 token ids with a span of about 600 characters each, finish.

    python benchmarks/store.py [--quick] [--json] [--peer PYTHON]

With `--peer` (or AGL_PEER_PYTHON), the python of an environment that agentlightning 0.3.0 from PyPI is installed in,
the same life cycle runs on its in-memory store, in process and over HTTP, in the same run.

Keys: `in_process_rps` (SQLite file, 32 clients); `http_rps_8`, `http_rps_32` (8 and 32 clients, a rollout's calls in
one request), `http_single_rps_32` (one request per operation); `http_batched_rps` (bulk requests of 64 rollouts);
`wide_spans_ratio` (4,160 ids per call, against `in_process_rps`); `growth_worst_ratio` (the operation that slows down
most between an almost empty and a full database); `rss_mb_growth` (resident memory while filling it);
`claim_latency_ms`, `finish_latency_ms` (over HTTP, medians: from asking for an enqueue to a waiting runner's claim, and
from asking for a finish to the answer of who waits for the rollout).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from agentlightning.store import LightningStore, LightningStoreClient, LightningStoreServer, SqliteLightningStore
from agentlightning.types import (
    AttemptedRollout,
    AttemptStatus,
    CallInfo,
    CallRecord,
    EnqueueRolloutRequest,
    RolloutMode,
    RolloutStatus,
    Segment,
    Span,
    VersionRun,
)

TEXT = "The agent looked at the tool's answer and went on. " * 12
TASK = {"question": "What is 12 * 7?", "answer": 84}
CALLS = 4
BULK = 64


@functools.cache
def turn_segments(turn: int, prompt: int, response: int) -> tuple[Segment, Segment]:
    parent = f"r{turn - 1}" if turn else None
    ids = np.arange(prompt + response, dtype=np.int32)
    logprobs = np.full(response, -0.5, dtype=np.float32)
    versions = (VersionRun(0, 1),)
    return (
        Segment(f"p{turn}", parent, response if parent else 0, ids[:prompt]),
        Segment(f"r{turn}", f"p{turn}", prompt, ids[prompt:], logprobs, logprobs, versions),
    )


def call_record(claim: AttemptedRollout, turn: int, prompt: int = 256, response: int = 64) -> CallRecord:
    """One turn that continues the last one."""
    info = CallInfo(
        call_id=f"c{turn}:0",
        response_id=f"c{turn}",
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        choice=0,
        policy="policy",
        trained=True,
        agent=None,
        parent_call_id=f"c{turn - 1}:0" if turn else None,
        model="policy",
        dialect="chat",
        finish_reason="stop",
        start_time=0.0,
        end_time=1.0,
        temperature=1.0,
    )
    span = Span.from_attributes(
        attributes={"gen_ai.response.id": f"c{turn}", "gen_ai.output.messages": TEXT},
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        name="chat policy",
    )
    return CallRecord(info, f"p{turn}", f"r{turn}", turn_segments(turn, prompt, response), span)


# ---- life cycles -----------------------------------------------------------------------------------------------------


async def life_cycle(store: LightningStore, worker: str, *, prompt: int = 256, single: bool = False) -> int:
    """One rollout from enqueue to finish; `single` sends each call by itself."""
    await store.enqueue_rollout(TASK, mode=RolloutMode.TRAIN)
    claim = await store.dequeue_rollout(worker, timeout=5.0)
    assert claim is not None
    records = [call_record(claim, turn, prompt) for turn in range(CALLS)]
    for batch in [[record] for record in records] if single else [records]:
        await store.add_calls(batch)
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
    return 1


async def bulk_cycle(store: LightningStore, worker: str) -> int:
    """Many rollouts with a request per step."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=TASK, mode=RolloutMode.TRAIN)] * BULK)
    claims = await store.dequeue_many_rollouts(BULK, worker, timeout=5.0)
    await store.add_calls([call_record(claim, turn) for claim in claims for turn in range(CALLS)])
    done = [
        store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
        for claim in claims
    ]
    await asyncio.gather(*done)
    return len(claims)


async def throughput(cycle: Callable[[str], Awaitable[int]], clients: int, seconds: float) -> float:
    """Rollouts per second."""
    end = time.perf_counter() + seconds
    done = 0

    async def client(name: str) -> None:
        nonlocal done
        while time.perf_counter() < end:
            finished = await cycle(name)
            done += finished

    start = time.perf_counter()
    await asyncio.gather(*[client(f"worker-{n}") for n in range(clients)])
    return done / (time.perf_counter() - start)


# ---- in process ------------------------------------------------------------------------------------------------------


async def in_process(folder: Path, seconds: float) -> dict[str, float]:
    store = SqliteLightningStore(folder / "in-process.db")
    rps = await throughput(functools.partial(life_cycle, store), 32, seconds)
    wide = await throughput(functools.partial(life_cycle, store, prompt=4096), 32, seconds)
    await store.close()
    return {"in_process_rps": rps, "wide_spans_ratio": wide / rps}


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def serve(path: str, port: int) -> None:
    async def run() -> None:
        await LightningStoreServer(SqliteLightningStore(path), port=port).run_forever()

    uvloop.run(run())


@contextlib.contextmanager
def server(path: Path) -> Iterator[str]:
    """A server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(str(path), port), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


async def over_http(folder: Path, seconds: float) -> dict[str, float]:
    with server(folder / "http.db") as url:
        client = LightningStoreClient(url)
        await client.statistics()
        figures = {
            "http_rps_8": await throughput(functools.partial(life_cycle, client), 8, seconds),
            "http_rps_32": await throughput(functools.partial(life_cycle, client), 32, seconds),
            "http_single_rps_32": await throughput(functools.partial(life_cycle, client, single=True), 32, seconds),
            "http_batched_rps": await throughput(functools.partial(bulk_cycle, client), 8, seconds),
            **await latencies(client, 50),
        }
        await client.close()
    return figures


async def latencies(store: LightningStore, rounds: int) -> dict[str, float]:
    """How long those who wait wait after the news was sent."""
    claims, finishes = [], []
    for _ in range(rounds):
        waiting = asyncio.create_task(store.dequeue_rollout("waiter", timeout=10.0))
        await asyncio.sleep(0.02)
        start = time.perf_counter()
        await store.enqueue_rollout(TASK)
        claim = await waiting
        claims.append(time.perf_counter() - start)
        assert claim is not None
        finished = asyncio.create_task(store.wait_for_rollouts(rollout_ids=[claim.rollout_id], timeout=10.0))
        await asyncio.sleep(0.02)
        start = time.perf_counter()
        await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED)
        await finished
        finishes.append(time.perf_counter() - start)
    return {
        "claim_latency_ms": 1e3 * statistics.median(claims),
        "finish_latency_ms": 1e3 * statistics.median(finishes),
    }


# ---- growth ----------------------------------------------------------------------------------------------------------


async def fill(store: SqliteLightningStore, count: int) -> None:
    while (await store.statistics())["total_rollouts"] < count:
        await bulk_cycle(store, "filler")


async def probe(store: SqliteLightningStore, repeats: int) -> dict[str, float]:
    """Median seconds of the operations that must not depend on how much is stored."""
    seconds: dict[str, list[float]] = {}
    sample: AttemptedRollout | None = None

    async def timed(name: str, work: Awaitable[Any]) -> Any:
        start = time.perf_counter()
        result = await work
        seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for _ in range(repeats):
        await timed("enqueue", store.enqueue_rollout(TASK))
        sample = await timed("claim", store.dequeue_rollout("prober"))
        assert sample is not None
        await timed("calls", store.add_calls([call_record(sample, turn) for turn in range(CALLS)]))
        await timed("finish", store.update_attempt(sample.rollout_id, "latest", status=AttemptStatus.SUCCEEDED))
        await timed("spans of one", store.query_spans(sample.rollout_id))
        await timed("calls of one", store.query_calls([sample.rollout_id]))
        await timed("first page", store.query_rollouts(status_in=[RolloutStatus.SUCCEEDED], limit=20))
        newest = store.query_rollouts(sort_by="start_time", sort_order="desc", limit=20)
        await timed("newest page", newest)
        await timed("statistics", store.statistics())
    return {name: statistics.median(values) for name, values in seconds.items()}


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


async def growth(folder: Path, sizes: tuple[int, ...], repeats: int) -> dict[str, float]:
    store = SqliteLightningStore(folder / "growth.db")
    tables: dict[int, dict[str, float]] = {}
    memory: list[float] = []
    for size in sizes:
        await fill(store, size)
        await probe(store, repeats // 4)
        tables[size] = await probe(store, repeats)
        memory.append(resident_mb())
    await store.close()
    print("\nmedian milliseconds with … rollouts stored")
    print(f"{'':14}" + "".join(f"{size:>12,}" for size in sizes))
    for name in tables[sizes[0]]:
        print(f"{name:14}" + "".join(f"{tables[size][name] * 1e3:12.3f}" for size in sizes))
    worst = max(tables[sizes[-1]][name] / tables[sizes[0]][name] for name in tables[sizes[0]])
    return {"growth_worst_ratio": worst, "rss_mb_growth": memory[-1] - memory[0]}


# ---- the peer --------------------------------------------------------------------------------------------------------

PEER = "agentlightning 0.3.0"


def peer_figures(python: str, seconds: float) -> dict[str, float]:
    """What the peer's own interpreter measures; isolated, so that it does not import us."""
    script = Path(__file__).parent / "peers" / "store_agentlightning_0_3_0.py"
    command = [python, "-I", str(script), "--seconds", str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def show(figures: dict[str, float], peer: dict[str, float]) -> None:
    table = Table("", "ours", *([PEER, "ratio"] if peer else []))
    for key, value in figures.items():
        other = peer.get(key)
        table.add_row(key, f"{value:,.2f}", *([f"{other:,.0f}", f"{value / other:.1f}x"] if other else []))
    Console(width=100).print(table)
    if not peer:
        print(f"{PEER} was not measured beside it: give the python it is installed in with --peer.")


async def main(arguments: argparse.Namespace) -> None:
    seconds = 2.0 if arguments.quick else 8.0
    sizes = (1_000, 6_000) if arguments.quick else (1_000, 20_000, 200_000)
    peer = peer_figures(arguments.peer, seconds) if arguments.peer else {}
    with TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        figures = await in_process(folder, seconds)
        figures |= await over_http(folder, seconds)
        figures |= await growth(folder, sizes, 100 if arguments.quick else 400)
    show(figures, peer)
    if arguments.json:
        figures |= {f"peer_{key}": value for key, value in peer.items()}
        print(json.dumps({key: round(value, 3) for key, value in figures.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute, smaller sizes")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--peer", default=os.environ.get("AGL_PEER_PYTHON"), help=f"python with {PEER}")
    uvloop.run(main(parser.parse_args()))
