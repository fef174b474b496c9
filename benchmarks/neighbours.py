"""What one agent can do to another: a short call's time alone, and beside each of several attacks by one other agent.

The victim and the attacker are processes of their own, each with the key of its own attempt, over loopback. Attacks on
the gateway run against an engine that answers at once, attacks on the engine against the shipped model. Each attack
repeats its requests for a few seconds, several at once, and stops by itself.

An attack takes processors from everybody, whatever it is aimed at. So each attack on the gateway is measured a second
time with another gateway as its aim, a process that has nothing to do with the victim's ("p99 other"): what a short
call waits then is the machine's doing, and what it waits beyond that is the gateway's. Ratios to a short call's p99
with no attack are told for both ("x alone", "other"). With nobody attacking it is measured before each attack and after
the last, and its p99 is that of all these calls: of one such time alone it varies as much as between attacks. On a
machine with as many idle processors as there are processes (five) the two agree; the first is the one to judge by.
    python benchmarks/neighbours.py [--quick] [--json] [--only TEXT]

With --memory N it says instead what the gateway's process holds before, during and after N attempts, one after another,
that each send four requests of 4,001 messages.
    python benchmarks/neighbours.py --memory 1000
With --open as well the attempts stay open, and all together may hold 32 MiB (history_total_bytes).
    python benchmarks/neighbours.py --memory 1000 --open
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import logging
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes, token_hex
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import numpy as np

ASK: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 8}
PAUSE = 0.01
"""Between two of the victim's calls."""
MAX_CONTEXT = 2**15
WARM_ATTEMPTS = 5
"""After so many the process has loaded what it loads."""


@dataclass(frozen=True)
class Attack:
    """Requests that one agent repeats."""

    path: str
    body: Callable[[], bytes]
    at_once: int = 4
    engine: bool = False
    """Whether it is aimed at the engine."""
    read_timeout: float = 60.0
    """After so many seconds the attacker hangs up."""
    fresh: bool = False
    """Whether each request has a body of its own."""
    at_store: bool = False
    """Whether it is sent to the store's server, which shares the gateway's process: gzipped OTLP."""


def chat(**fields: Any) -> bytes:
    return json.dumps({**ASK, **fields}).encode()


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def short_messages() -> bytes:
    """A conversation of 4,001 messages of one word, which no other one begins like."""
    return chat(messages=[*said(token_hex(8)), *said("word") * 4000])


def odd_schema(properties: int) -> dict[str, Any]:
    patterns = {f"^x{i}[a-z]*$": {"type": "string"} for i in range(properties)}
    return {"type": "object", "patternProperties": patterns, "additionalProperties": False}


def many_choices(count: int) -> dict[str, Any]:
    """All of so many choices of two: too many objects to tell apart, which takes a while to find out."""
    return {"allOf": [{"anyOf": [{"properties": {f"{x}{i}": {"type": "string"}}} for x in "ab"]} for i in range(count)]}


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def field(tag: bytes, said: bytes) -> bytes:
    """A field of protobuf that is a message or a text."""
    length, size = b"", len(said)
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return tag + length + bytes([size]) + said


def empty_spans(count: int) -> bytes:
    """An OTLP export of spans that say nothing, in a few KiB of gzip."""
    return gzip.compress(field(b"\x0a", field(b"\x12", b"\x12\x00" * count)))


ATTACKS: dict[str, Attack] = {
    "1 text of 1 MB": Attack("/chat/completions", lambda: chat(messages=said("word, " * 170_000))),
    "1 count_tokens, 30 MB": Attack("/messages/count_tokens", lambda: chat(messages=said("word, " * 5_000_000))),
    "1 count_tokens, hung up": Attack(
        "/messages/count_tokens", lambda: chat(messages=said("word, " * 5_000_000)), read_timeout=0.2
    ),
    "1 ten million lists": Attack("/chat/completions", lambda: chat(x=0)[:-1] + b', "y": [' + b"[]," * 10**7 + b"[]]}"),
    "1 hundred thousand values": Attack("/chat/completions", lambda: chat(metadata=[{"a": []}] * 30_000)),
    "1 deep brackets": Attack("/chat/completions", lambda: b'{"model": "policy", "x": ' + b"[" * 10**6),
    "1 ten thousand messages": Attack("/chat/completions", lambda: chat(messages=said("?") * 10_000)),
    "3 many short messages": Attack("/chat/completions", short_messages, fresh=True),
    "1 long tools": Attack(
        "/chat/completions",
        lambda: chat(tools=[{"type": "function", "function": {"name": "t", "description": "word, " * 400_000}}]),
    ),
    "1 long schema": Attack(
        "/chat/completions",
        lambda: chat(
            tools=[{"type": "function", "function": {"name": "t", "parameters": {"description": "word, " * 400_000}}}]
        ),
    ),
    "1 schema of choices": Attack("/chat/completions", lambda: chat(response_format=format_of(many_choices(12)))),
    "8 OTLP, two million empty spans": Attack("/v1/traces", lambda: empty_spans(2_000_000), at_store=True),
    "8 OTLP, five thousand empty spans": Attack("/v1/traces", lambda: empty_spans(5_000), at_store=True),
    "9 stop list of 1 MB, n=128": Attack("/chat/completions", lambda: chat(stop=["x" * 30] * 30_000, n=128)),
    "9 old reasoning, n=128": Attack(
        "/chat/completions",
        lambda: chat(
            messages=[*said("?"), {"role": "assistant", "content": "5", "reasoning_content": "so " * 3000}, *said("?")],
            n=128,
        ),
    ),
    "12 dripping clients": Attack("", lambda: b"POST /v1/chat/completions HTTP/1.1\r\n", at_once=200),
    "10 pattern properties, n=128": Attack(
        "/chat/completions", lambda: chat(response_format=format_of(odd_schema(500)), n=128, max_tokens=50), engine=True
    ),
    "10 nested repetitions, n=128": Attack(
        "/chat/completions",
        lambda: chat(response_format=format_of({"type": "string", "pattern": "^(a{1000}){1000}$"}), n=128),
        engine=True,
    ),
    "10 long stop list": Attack(
        "/chat/completions", lambda: chat(stop=[f"s{i}" for i in range(10_000)], max_tokens=50), engine=True
    ),
    "11 ten times n=128": Attack("/chat/completions", lambda: chat(n=128, max_tokens=100), at_once=10, engine=True),
}

# ---- the two agents, in processes of their own -----------------------------------------------------------------------


async def victim(spec: dict[str, Any]) -> dict[str, Any]:
    """Short calls, one after another."""
    waits: list[float] = []
    failures = 0
    end = time.perf_counter() + spec["seconds"]
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {spec['key']}"}, timeout=timeout) as session:
        while time.perf_counter() < end:
            start = time.perf_counter()
            async with session.post(f"{spec['url']}/chat/completions", json=ASK) as answer:
                await answer.read()
                failures += answer.status != 200
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(PAUSE)
    return {"waits": waits, "failures": failures}


async def attacker(spec: dict[str, Any]) -> dict[str, Any]:
    """The attack's requests until the time is over; the statuses of the answers."""
    attack, statuses = ATTACKS[spec["attack"]], {}
    body, parts = attack.body(), urlsplit(spec["url"])
    url = spec["store" if attack.at_store else "url"] + attack.path
    end = time.perf_counter() + spec["seconds"]

    async def drip() -> None:
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(body)
        while time.perf_counter() < end and not writer.is_closing():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.5)
        writer.close()

    async def send(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < end:
            try:
                sent = attack.body() if attack.fresh else body
                async with session.post(url, data=sent) as answer:
                    await answer.read()
                    status = str(answer.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                status = type(error).__name__
            statuses[status] = statuses.get(status, 0) + 1

    if not attack.path:
        await asyncio.gather(*[drip() for _ in range(attack.at_once)])
        return {"statuses": statuses}
    timeout = aiohttp.ClientTimeout(total=min(attack.read_timeout, spec["seconds"] + 30))
    headers = {"authorization": f"Bearer {spec['key']}", "content-type": "application/json"}
    if attack.at_store:
        headers |= {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
        await asyncio.gather(*[send(session) for _ in range(attack.at_once)])
    return {"statuses": statuses}


async def in_other_process(role: str, spec: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--role", role, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate(json.dumps(spec).encode())
    return json.loads(out)


# ---- the gateway, in this one ----------------------------------------------------------------------------------------


class Echo:
    """An engine that says the same at once."""

    def __init__(self, rendering: Any, max_context: int) -> None:
        from agentlightning.engine.base import EngineInfo

        stop = rendering.stop_token_ids[0]
        self.ids = np.append(rendering.encode("It is 5."), np.int32(stop)).astype(np.int32)
        self.logprobs = np.linspace(-0.1, -2, len(self.ids)).astype(np.float32)
        self._info = EngineInfo(
            model="echo", max_context=max_context, max_concurrency=1000, vocab_size=1000, eos_ids=(stop,), version=0
        )

    async def info(self) -> Any:
        return self._info

    async def generate(
        self, prompt_ids: Any, params: Any, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        from agentlightning.engine.base import Chunk

        yield Chunk(ids=self.ids, logprobs=self.logprobs, plain_logprobs=self.logprobs, version=0, finish_reason="stop")


async def be_another() -> None:
    """A gateway of its own, and an attempt at it, until nobody listens any more."""
    from agentlightning.gateway import load_rendering
    from agentlightning.models import resolve_model

    rendering = load_rendering(resolve_model("calc"))
    async with served(Echo(rendering, MAX_CONTEXT), rendering) as site:
        print(json.dumps(await place(site)), flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@asynccontextmanager
async def another() -> AsyncIterator[dict[str, str]]:
    """The place of an attempt at a gateway in another process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--role", "another"), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    yield json.loads(await process.stdout.readline())
    process.stdin.close()
    await process.wait()


class Site(NamedTuple):
    store: Any
    gateway: Any
    server: Any
    """Of the store."""


@asynccontextmanager
async def served(engine: Any, rendering: Any, **limits: int) -> AsyncIterator[Site]:
    from agentlightning.gateway import Gateway
    from agentlightning.gateway.limits import RequestLimits
    from agentlightning.store import LightningStoreServer, SqliteLightningStore

    secret = token_bytes(32)
    with TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.sqlite")
        server = LightningStoreServer(store, port=0, admin_key=token_hex(16), secret=secret)
        await server.start()
        async with Gateway(store, engine, rendering, secret=secret, request_limits=RequestLimits(**limits)) as gateway:
            yield Site(store, gateway, server)
        await server.stop()
        await store.close()


async def place(site: Site) -> dict[str, str]:
    """The URLs and the key of a fresh attempt."""
    claimed = await site.store.start_rollout(input={})
    ids = claimed.rollout_id, claimed.attempt.attempt_id
    url = site.gateway.as_resource().get_base_url(*ids)
    return {"url": url, "key": site.gateway.key_for(*ids), "store": site.server.endpoint}


async def measured(site: Site, name: str | None, seconds: float, aim: dict[str, str] | None = None) -> dict[str, Any]:
    """The victim's calls, alone or beside an attack, on this gateway unless another is its `aim`."""
    calm = {**await place(site), "seconds": seconds}
    if name is None:
        return await in_other_process("victim", calm)
    hostile = {**(aim or await place(site)), "seconds": seconds + 1, "attack": name}
    fought = asyncio.create_task(in_other_process("attacker", hostile))
    await asyncio.sleep(1.0)  # it has begun
    found = await in_other_process("victim", calm)
    return {**found, **await fought}


def figures_of(found: dict[str, Any]) -> dict[str, Any]:
    waits = np.array(found["waits"]) * 1e3
    p50, p99 = np.percentile(waits, [50, 99])
    return {
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "worst_ms": float(waits.max()),
        "calls": len(waits),
        "failed": found["failures"],
        "answers": found.get("statuses", {}),
    }


def row(name: str, f: dict[str, Any], elsewhere: dict[str, Any] | None, alone: float) -> None:
    answers = ", ".join(f"{count}x {status}" for status, count in sorted(f["answers"].items()))
    beside = "" if elsewhere is None else f"{elsewhere['p99_ms']:.1f}"
    ratios = f"{f['p99_ms'] / alone:>9.1f}{'' if elsewhere is None else format(elsewhere['p99_ms'] / alone, '.1f'):>7}"
    waits = f"{f['p50_ms']:>9.1f}{f['p99_ms']:>9.1f}{f['worst_ms']:>10.1f}{beside:>11}{ratios}"
    print(f"{name:<32}{waits}{f['calls']:>7}{f['failed']:>7}  {answers}", flush=True)


async def run(quick: bool, only: str) -> dict[str, Any]:
    from agentlightning.backend.base import ModelSpec
    from agentlightning.backend.embedded.backend import EmbeddedBackend
    from agentlightning.gateway import load_rendering
    from agentlightning.models import resolve_model

    seconds = 4.0 if quick else 10.0
    rendering = load_rendering(resolve_model("calc"))
    rows: dict[str, dict[str, Any]] = {}
    elsewhere: dict[str, dict[str, Any]] = {}
    waits = f"{'p50 ms':>9}{'p99 ms':>9}{'worst ms':>10}{'p99 other':>11}{'x alone':>9}{'other':>7}"
    print(f"{'a short call beside':<32}{waits}{'calls':>7}{'failed':>7}  the attacker got")

    async def series(engine: Any, alone: str, *, on_engine: bool, aim: dict[str, str] | None = None) -> None:
        async with served(engine, rendering) as site:
            calm: list[dict[str, Any]] = []

            async def nobody() -> None:
                await asyncio.sleep(1.0)  # what an attack has left behind has ended
                calm.append(await measured(site, None, seconds))
                waits = [wait for found in calm for wait in found["waits"]]
                rows[alone] = figures_of({"waits": waits, "failures": sum(found["failures"] for found in calm)})

            for name in [n for n, a in ATTACKS.items() if a.engine == on_engine and only in n]:
                await nobody()
                rows[name] = figures_of(await measured(site, name, seconds))
                if aim:
                    elsewhere[name] = figures_of(await measured(site, name, seconds, aim))
                row(name, rows[name], elsewhere.get(name), rows[alone]["p99_ms"])
            await nobody()
            row(alone, rows[alone], None, rows[alone]["p99_ms"])
            each = ", ".join(f"{figures_of(found)['p99_ms']:.1f}" for found in calm)
            print(f"{alone}: the p99 of each of the {len(calm)} times was {each} ms", flush=True)

    async with another() as aim:
        await series(Echo(rendering, MAX_CONTEXT), "nobody", on_engine=False, aim=aim)
    if any(attack.engine and only in name for name, attack in ATTACKS.items()):
        backend = EmbeddedBackend(ModelSpec(model=resolve_model("calc")))
        await backend.start()
        try:
            await series(backend.engine("policy"), "nobody (real engine)", on_engine=True)
        finally:
            await backend.close()
    return {**summary(rows["nobody"]["p99_ms"], rows, elsewhere), "rows": rows, "elsewhere": elsewhere}


async def memory(count: int, *, stay_open: bool) -> dict[str, float]:
    """MiB of this process, which is the gateway's, before so many attempts, at most meanwhile, and after them."""
    from psutil import Process

    from agentlightning.gateway import load_rendering
    from agentlightning.models import resolve_model

    rendering, process = load_rendering(resolve_model("calc")), Process()
    held: list[float] = []
    limits = {"history_total_bytes": 32 * 2**20} if stay_open else {}
    async with served(Echo(rendering, MAX_CONTEXT), rendering, **limits) as site, aiohttp.ClientSession() as session:
        for number in range(count + WARM_ATTEMPTS):
            if number >= WARM_ATTEMPTS:
                held.append(process.memory_info().rss / 2**20)
            at = await place(site)
            headers = {"authorization": f"Bearer {at['key']}", "content-type": "application/json"}
            for _ in range(4):
                async with session.post(
                    f"{at['url']}/chat/completions", data=short_messages(), headers=headers
                ) as answer:
                    assert answer.status == 200, await answer.text()
            parts = urlsplit(at["url"]).path.split("/")
            if not stay_open:
                await site.gateway.close_attempt(parts[2], parts[4])
            if number % 100 == 0:
                print(f"{number:>6} attempts {process.memory_info().rss / 2**20:>8.0f} MiB", flush=True)
        after = process.memory_info().rss / 2**20
    found = {"before_mib": held[0], "most_mib": max(held), "after_mib": after, "grown_mib": after - held[0]}
    print(", ".join(f"{name} {value:.0f}" for name, value in found.items()))
    return found


def summary(alone: float, rows: dict[str, dict[str, Any]], elsewhere: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of the attacks on the gateway: the one beside which a short call's p99 is longest, and what of it is the
    machine's.
    """
    worst = max(elsewhere, key=lambda name: rows[name]["p99_ms"])
    own, others = rows[worst]["p99_ms"], elsewhere[worst]["p99_ms"]
    return {
        "short_call_p99_ms_alone": alone,
        "short_call_p99_ms_attacked": own,
        "short_call_p99_ms_attacked_elsewhere": others,
        "worst_attack": worst,
        "ratio_to_alone": own / alone,
        "ratio_to_alone_elsewhere": others / alone,
        "ratio_to_elsewhere": own / others,
        "worst_single_wait_ms": max(rows[name]["worst_ms"] for name in elsewhere),
        "lost": sum(rows[name]["failed"] for name in elsewhere),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four seconds an attack instead of ten")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    parser.add_argument("--only", default="", help="only the attacks whose name this stands in")
    parser.add_argument("--memory", type=int, metavar="N", help="what N attempts leave in memory, instead")
    parser.add_argument("--open", action="store_true", help="with --memory: none of the attempts ends")
    parser.add_argument("--role", choices=("victim", "attacker", "another"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    import uvloop

    if options.role == "another":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(be_another())
        return
    if options.role:
        role = victim if options.role == "victim" else attacker
        print(json.dumps(asyncio.run(role(json.load(sys.stdin)))))
        return
    logging.basicConfig(level=logging.ERROR)  # attempts that are left behind are given up, which is said
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        work = memory(options.memory, stay_open=options.open) if options.memory else run(options.quick, options.only)
        figures: dict[str, Any] = runner.run(work)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
