"""What the gateway adds to a model call: latency, throughput, long prompts, many slow calls at once, memory.

The engine answers at once with 64 tokens and their log-probs, so all that is measured is the gateway, with a SQLite
store recording every call. The load comes from a process of its own over keep-alive connections. `plain_` are a bare
Starlette server's figures for the same bodies in the same minutes: what the machine and HTTP take by themselves.
    python benchmarks/gateway.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import socket
import statistics
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import numpy as np

PROMPT_TOKENS, RESPONSE_TOKENS = 512, 64

# Measured on a machine of the same kind; compare ratios, wall times swing by a third.
PEERS = {
    "agent-lightning 1.0": {"added_p50_ms": 2.3, "added_p99_ms": 4.5, "rps_32": 376},
    "agentlightning 0.3.0": {"added_p50_ms": 31, "added_p99_ms": 48, "rps_32": 32},
}

# ---- the load, in a process of its own -----------------------------------------------------------------------------


async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, bytes]:
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length:") + 15
    return int(head[9:12]), await reader.readexactly(int(head[at : head.index(b"\r\n", at)]))


def request_of(url: str, key: str, body: bytes) -> bytes:
    parts = urlsplit(url)
    head = (
        f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def load(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` requests over `concurrency` connections; conversations take turns if there are several."""
    places = [(place["url"], place["key"]) for place in spec["places"]]
    waiting = iter(range(spec["count"]))
    bodies = [body.encode() for body in spec["bodies"]]
    latencies: list[float] = []
    failures = 0

    async def client() -> None:
        nonlocal failures
        parts = urlsplit(places[0][0])
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
        for number in waiting:
            url, key = places[number % len(places)]
            request = request_of(url, key, bodies[number % len(bodies)])
            start = time.perf_counter()
            status, _ = await post(reader, writer, request)
            latencies.append(time.perf_counter() - start)
            failures += status != 200
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*[client() for _ in range(spec["concurrency"])])
    return {"latencies": latencies, "seconds": time.perf_counter() - start, "failures": failures}


async def converse(spec: dict[str, Any]) -> dict[str, Any]:
    """One conversation of `turns` turns: each request holds all answers so far."""
    place = spec["places"][0]
    parts = urlsplit(place["url"])
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    messages, latencies = list(spec["messages"]), []
    for turn in range(spec["turns"]):
        body = json.dumps({"model": "policy", "messages": messages, "logprobs": True}).encode()
        start = time.perf_counter()
        status, answer = await post(reader, writer, request_of(place["url"], place["key"], body))
        latencies.append(time.perf_counter() - start)
        assert status == 200, answer
        messages.append(json.loads(answer)["choices"][0]["message"])
        messages.append({"role": "user", "content": f"And then, in turn {turn}?"})
    writer.close()
    return {"latencies": latencies}


async def in_other_process(spec: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--load", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**26
    )
    out, _ = await process.communicate(json.dumps(spec).encode())
    return json.loads(out)


# ---- the gateway, in this one --------------------------------------------------------------------------------------


class Echo:
    """An engine that always says the same, after `delay` seconds."""

    def __init__(self, response: Any, stop: int, max_context: int) -> None:
        from agentlightning.engine.base import EngineInfo

        self.ids = np.append(response[: RESPONSE_TOKENS - 1], np.int32(stop)).astype(np.int32)
        self.logprobs = np.linspace(-0.1, -2, len(self.ids)).astype(np.float32)
        self.delay = 0.0
        self._info = EngineInfo(
            model="echo", max_context=max_context, max_concurrency=1000, vocab_size=1000, eos_ids=(stop,), version=0
        )

    async def info(self) -> Any:
        return self._info

    async def generate(
        self, prompt_ids: Any, params: Any, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        from agentlightning.engine.base import Chunk

        if self.delay:
            await asyncio.sleep(self.delay)
        yield Chunk(ids=self.ids, logprobs=self.logprobs, plain_logprobs=self.logprobs, version=0, finish_reason="stop")


class Bench:
    """A running gateway and what to send it."""

    def __init__(self, store: Any, gateway: Any, engine: Echo, rendering: Any) -> None:
        self.store, self.gateway, self.engine, self.rendering = store, gateway, engine, rendering

    async def places(self, count: int) -> list[dict[str, str]]:
        """Base URLs and keys of fresh attempts."""
        resource = self.gateway.as_resource()
        claimed = [await self.store.start_rollout(input={}) for _ in range(count)]
        ids = [(c.rollout_id, c.attempt.attempt_id) for c in claimed]
        return [{"url": resource.get_base_url(r, a), "key": self.gateway.key_for(r, a)} for r, a in ids]

    def messages(self, tokens: int) -> list[dict[str, str]]:
        """A prompt of about that many tokens."""
        text = "The quick brown fox jumps over the lazy dog, and counts 1, 2, 3. "
        times = max(1, round(tokens / len(self.rendering.encode(text))))
        return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text * times}]

    async def close(self, places: Sequence[dict[str, str]]) -> None:
        for place in places:
            _, _, _, rollout, _, attempt, _ = place["url"].split("/")[1:]
            await self.gateway.close_attempt(rollout, attempt)


def percentile(latencies: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.array(latencies), percent)) * 1e3


def bodies_of(messages: Any, count: int = 1) -> list[str]:
    """Requests whose prompts differ in their last words."""
    last = messages[-1]
    varied = [[*messages[:-1], {**last, "content": f"{last['content']}{i}"}] for i in range(count)]
    return [json.dumps({"model": "policy", "messages": m, "logprobs": True}) for m in varied]


@asynccontextmanager
async def plain(answer: bytes) -> AsyncIterator[dict[str, str]]:
    """The place of a bare server in this process: it reads a request's JSON and always says the same."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def respond(request: Request) -> Response:
        await request.json()
        return Response(answer, media_type="application/json")

    app = Starlette(routes=[Route("/{path:path}", respond, methods=["POST"])])
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve([listening]))
        yield {"url": f"http://127.0.0.1:{listening.getsockname()[1]}", "key": "none"}
        server.should_exit = True
        await serving


async def measure_saturated(spec: dict[str, Any], quick: bool) -> dict[str, float]:
    """32 clients that always have a request open, at the gateway and at a bare server, in turns: on a busy machine both
    wait for it, and what stays is their ratio.
    """
    rounds, count = (4, 500) if quick else (8, 1250)
    place = spec["places"][0]
    parts = urlsplit(place["url"])
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=2**24)
    _, answer = await post(reader, writer, request_of(place["url"], place["key"], spec["bodies"][0].encode()))
    writer.close()
    waits: dict[str, list[float]] = {"": [], "plain_": []}
    cpu, seconds = dict.fromkeys(waits, 0.0), dict.fromkeys(waits, 0.0)
    async with plain(answer) as bare:
        for _ in range(rounds):
            for name, places in (("", spec["places"]), ("plain_", [bare])):
                before = time.process_time()
                found = await in_other_process({**spec, "places": places, "count": count, "concurrency": 32})
                cpu[name] += time.process_time() - before
                seconds[name] += found["seconds"]
                waits[name] += found["latencies"]
                assert found["failures"] == 0
    figures: dict[str, float] = {}
    for name, found in waits.items():
        figures[f"{name}rps_32"] = len(found) / seconds[name]
        figures[f"{name}cpu_ms_32"] = 1e3 * cpu[name] / len(found)
        figures[f"{name}p99_32_ms"] = percentile(found, 99)
    return {**figures, "p99_32_to_plain": figures["p99_32_ms"] / figures["plain_p99_32_ms"]}


async def measure_load(bench: Bench, quick: bool) -> dict[str, float]:
    """Many attempts, each asked the same prompt again and again (as groups of siblings do)."""
    places = await bench.places(64)
    spec = {"kind": "load", "places": places, "bodies": bodies_of(bench.messages(PROMPT_TOKENS))}
    await in_other_process({**spec, "count": 128, "concurrency": 8})  # first sight of each attempt
    one = await in_other_process({**spec, "count": 400 if quick else 2000, "concurrency": 1})
    assert one["failures"] == 0
    saturated = await measure_saturated(spec, quick)
    start = time.perf_counter()
    await bench.close(places)
    return {
        "added_p50_ms": percentile(one["latencies"], 50),
        "added_p99_ms": percentile(one["latencies"], 99),
        **saturated,
        "barrier_ms": 1e3 * (time.perf_counter() - start),
    }


async def measure_first_calls(bench: Bench, quick: bool) -> dict[str, float]:
    """The first call of a fresh attempt, with a prompt nobody has asked before: look-up and tokenisation included."""
    count = 200 if quick else 600
    bodies = bodies_of(bench.messages(PROMPT_TOKENS), count)
    spec = {"kind": "load", "places": await bench.places(count), "bodies": bodies, "count": count, "concurrency": 1}
    found = await in_other_process(spec)
    assert found["failures"] == 0
    return {"first_call_p50_ms": percentile(found["latencies"], 50)}


async def measure_slow_engine(bench: Bench) -> dict[str, float]:
    """250 calls at once to an engine that takes two seconds."""
    bench.engine.delay = 2.0
    spec = {"kind": "load", "places": await bench.places(250), "bodies": bodies_of(bench.messages(PROMPT_TOKENS))}
    found = await in_other_process({**spec, "count": 250, "concurrency": 250})
    bench.engine.delay = 0.0
    assert found["failures"] == 0
    return {"slow_upstream_250_s": found["seconds"]}


async def measure_long(bench: Bench, quick: bool) -> dict[str, float]:
    """A conversation that starts with 32k tokens; the first call tokenises them and does not count."""
    spec = {"kind": "converse", "places": await bench.places(1), "messages": bench.messages(32_000)}
    found = await in_other_process({**spec, "turns": 10 if quick else 30})
    return {
        "added_p50_ms_32k": percentile(found["latencies"][1:], 50),
        "first_call_ms_32k": 1e3 * found["latencies"][0],
    }


async def measure_memory(bench: Bench, quick: bool) -> dict[str, float]:
    """Bytes of Python memory per call in the first and the second half of conversations of 50 turns."""
    conversations = 4 if quick else 16
    halves = []
    tracemalloc.start()
    for turns in (25, 50):
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        for place in await bench.places(conversations):
            spec = {"kind": "converse", "places": [place], "messages": bench.messages(PROMPT_TOKENS), "turns": turns}
            await in_other_process(spec)
        gc.collect()
        halves.append((tracemalloc.get_traced_memory()[0] - before) / conversations)
    tracemalloc.stop()
    first, second = halves[0] / 25, (halves[1] - halves[0]) / 25
    return {"bytes_per_call_turns_1_25": first, "bytes_per_call_turns_26_50": second}


async def measure_journal(bench: Bench, gateway: Any, quick: bool) -> dict[str, float]:
    """CPU per call with and without a journal, one call after another, in turns, so that a busy machine costs both the
    same. `gateway` keeps a journal.
    """
    kept = Bench(bench.store, gateway, bench.engine, bench.rendering)
    count, rounds = (200, 6) if quick else (500, 12)
    bodies = bodies_of(bench.messages(PROMPT_TOKENS))
    cpu: dict[Bench, list[float]] = {bench: [], kept: []}
    for _ in range(rounds):
        for one in cpu:
            places = await one.places(1)
            spec = {"kind": "load", "places": places, "bodies": bodies, "count": count, "concurrency": 1}
            before = time.process_time()
            found = await in_other_process(spec)
            await one.close(places)
            cpu[one].append(1e3 * (time.process_time() - before) / count)
            assert found["failures"] == 0
    return {
        "cpu_ms_1_no_journal": statistics.median(cpu[bench]),
        "cpu_ms_1_journal": statistics.median(cpu[kept]),
    }


async def run(quick: bool) -> dict[str, float]:
    from agentlightning.gateway import Gateway, load_rendering
    from agentlightning.models import resolve_model
    from agentlightning.store import SqliteLightningStore

    rendering = load_rendering(resolve_model("calc"))
    engine = Echo(rendering.encode("It counts 1, 2, 3 and jumps. " * 64), rendering.stop_token_ids[0], 2**17)
    with TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.sqlite")
        async with Gateway(store, engine, rendering) as gateway:
            bench = Bench(store, gateway, engine, rendering)
            figures = await measure_load(bench, quick)
            async with Gateway(store, engine, rendering, journal=Path(folder) / "journal") as keeps:
                figures |= await measure_journal(bench, keeps, quick)
            figures |= await measure_first_calls(bench, quick)
            figures |= await measure_slow_engine(bench)
            figures |= await measure_long(bench, quick)
            figures |= await measure_memory(bench, quick)
        await store.close()
    return figures


def show(figures: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Added by the gateway ({PROMPT_TOKENS} prompt + {RESPONSE_TOKENS} response tokens, recorded)")
    for column in ("", "ours", *PEERS):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in figures.items():
        peers = [f"{peer[name]:g}" if name in peer else "" for peer in PEERS.values()]
        table.add_row(name, f"{value:,.2f}", *peers)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under a minute, fewer requests")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.load:
            spec = json.load(sys.stdin)
            print(json.dumps(runner.run(load(spec) if spec["kind"] == "load" else converse(spec))))
            return
        figures = runner.run(run(options.quick))
    show(figures)
    if options.json:
        print(json.dumps({**figures, "peers": PEERS}))


if __name__ == "__main__":
    main()
