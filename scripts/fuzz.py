"""Fuzzing of what strangers reach: the gateway's wire formats, the store's API, and files that a disk has damaged.

    python scripts/fuzz.py gateway [--seconds 600] [--seed 0]   requests of a grammar (scripts/grammar.py), over HTTP
    python scripts/fuzz.py store   [--seconds 600] [--seed 0]   schemathesis over the store's OpenAPI document
    python scripts/fuzz.py files   [--seconds 600] [--seed 0]   databases and models with bytes changed

A finding is an answer of 500 or above (but a 503 that says what is away), one that takes more than a second of the
server's processor time, memory that goes on growing, and of a damaged file any error that is none of the library's.
Findings are printed with what brings them back; the exit status is 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
SECONDS_OF_PROCESSOR = 1.0
MOST_GROWTH = 48.0
"""MiB by which a server may grow in the second half."""
REQUESTS_OF_AN_ATTEMPT = 60
WARM_REQUESTS = 300
TOLD_EVERY = 60.0
FORKS = multiprocessing.get_context("forkserver")


@dataclass
class Findings:
    """What was found, each kind once with the first example."""

    examples: dict[str, str] = field(default_factory=dict)
    count: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, example: str) -> None:
        self.count[kind] += 1
        if kind not in self.examples:
            self.examples[kind] = example
            print(f"FOUND {kind}\n  {example[:4000]}", flush=True)


@dataclass
class Progress:
    """How long there is left, and what has been seen."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    told: float = field(default_factory=time.monotonic)
    seen: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return time.monotonic() - self.began > self.seconds

    def tell(self, more: str = "") -> None:
        if time.monotonic() - self.told > TOLD_EVERY:
            self.told = time.monotonic()
            answers = ", ".join(f"{count}x {name}" for name, count in sorted(self.seen.items()))
            print(f"{self.told - self.began:>6.0f} s  {answers}  {more}", flush=True)


# ---- the gateway -----------------------------------------------------------------------------------------------------

SAID = (
    *("It is 5.", "", '<tool_call>\n{"name": "calc", "arguments": {"a": 1,  "b": 2}}\n</tool_call>', '{"a": 5}'),
    *("<tool_call>", '<tool_call>{"name": 5}</tool_call>', "<think>\nso\n</think>\n\n5", "<think>", "</think>", "[[["),
    *(
        '<tool_call>\n{"name": "calc", "arguments": "x"}\n</tool_call>' * 3,
        "💥" * 5,
        "\ufffd\ufffd",
        "<tool_response>x",
    ),
)


class Babbler:
    """An engine that says at once one thing or another, some of them odd."""

    def __init__(self, rendering: Any) -> None:
        self._rendering = rendering
        self._said = itertools.cycle(SAID)

    async def info(self) -> Any:
        from agentlightning.engine.base import EngineInfo

        stops = self._rendering.stop_token_ids
        return EngineInfo(
            model="babbler", max_context=4096, max_concurrency=256, vocab_size=1000, eos_ids=stops, version=0
        )

    async def generate(
        self, prompt_ids: Any, params: Any, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Any, None]:
        import numpy as np

        from agentlightning.engine.base import Chunk

        ids = np.array([*self._rendering.encode(next(self._said)), self._rendering.stop_token_ids[0]], dtype=np.int32)
        reason = "stop" if len(ids) <= params.max_tokens else "length"
        ids = ids[: params.max_tokens]
        logprobs = np.linspace(-0.1, -2, len(ids)).astype(np.float32)
        top = params.top_logprobs
        yield Chunk(
            ids=ids,
            logprobs=logprobs,
            plain_logprobs=logprobs,
            version=0,
            finish_reason=reason,
            top_ids=np.repeat(ids[:, None], top, axis=1) if top else None,
            top_logprobs=np.repeat(logprobs[:, None], top, axis=1) if top else None,
        )


async def be_the_gateway() -> None:
    """Serve; give a new attempt's place for each line that comes, and close the one before."""
    from agentlightning.gateway import Gateway, load_rendering
    from agentlightning.models import resolve_model
    from agentlightning.store import SqliteLightningStore

    logging.basicConfig(level=logging.ERROR)
    rendering = load_rendering(resolve_model("calc"))
    with TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.db")
        async with Gateway(store, Babbler(rendering), rendering) as gateway:
            ids = None
            while await asyncio.to_thread(sys.stdin.readline):
                if ids is not None:
                    await gateway.close_attempt(*ids)
                claimed = await store.start_rollout(input={})
                ids = claimed.rollout_id, claimed.attempt.attempt_id
                place = {"url": gateway.as_resource().get_base_url(*ids), "key": gateway.key_for(*ids)}
                print(json.dumps(place), flush=True)
        await store.close()


def fields_by_path() -> dict[str, tuple[str, ...]]:
    """The names of the fields that each wire format knows."""
    from agentlightning.gateway.dialects import DIALECTS
    from scripts.grammar import BODIES

    named = {path: dialect for dialect in DIALECTS for path in dialect.paths}
    found: dict[str, tuple[str, ...]] = {}
    for path in BODIES:
        dialect = named.get(path) or next(d for d in DIALECTS if d.name == "gemini")
        fields = dialect.fields
        found[path] = (*fields.honoured, *fields.harmless, *fields.unavailable)
    return found


async def fuzz_gateway(seconds: float, seed: int, findings: Findings) -> None:
    import aiohttp
    from psutil import Process

    from scripts.grammar import Grammar

    grammar, progress = Grammar(seed, fields_by_path()), Progress(seconds)
    command = [sys.executable, __file__, "--serve"]
    server = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**20
    )
    assert server.stdin is not None
    assert server.stdout is not None
    process, held = Process(server.pid), list[float]()
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
            at, answered, headers = dict[str, str](), None, dict[str, str]()
            for number in itertools.count():
                if number % REQUESTS_OF_AN_ATTEMPT == 0:
                    server.stdin.write(b"\n")
                    at, answered = json.loads(await server.stdout.readline()), None
                    headers = {"authorization": f"Bearer {at['key']}", "content-type": "application/json"}
                    held.append(process.memory_info().rss / 2**20)
                    if progress.is_over:
                        break
                path, body = grammar.request(answered)
                answered = await _one(session, process, at["url"], path, body, headers, findings, progress) or answered
                progress.tell(f"{held[-1]:.0f} MiB")
    finally:
        server.stdin.close()
        await asyncio.wait_for(server.wait(), 60)
    print(f"answers: {dict(progress.seen)}")
    _check_memory(held, findings)


async def _one(
    session: Any,
    process: Any,
    url: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    findings: Findings,
    progress: Progress,
) -> str | None:
    """Send one request; the id of a response that others can go on from."""
    import aiohttp

    base = url.removesuffix("/v1") + "/v1beta" if path.startswith("/models/") else url
    example, used = f"{path} {body.decode()}", _processor(process)
    try:
        async with session.post(base + path, data=body, headers=headers) as answer:
            text = await answer.text()
            status = answer.status
    except (TimeoutError, aiohttp.ClientError) as error:
        findings.add(f"{path}: {type(error).__name__}", example)
        return None
    progress.seen[str(status)] += 1
    if status >= 500:
        findings.add(f"{path}: {status} {text[:120]}", example)
    if (took := _processor(process) - used) > SECONDS_OF_PROCESSOR:
        findings.add(f"{path}: {took:.1f} s of processor time", example)
    if '"error"' in text and status == 200 and "internal" in text:
        findings.add(f"{path}: a stream broke off", f"{example}\n  {text[-500:]}")
    if path == "/responses" and status == 200 and text.startswith("{"):
        return json.loads(text).get("id")
    return None


def _processor(process: Any) -> float:
    """Seconds that the server has computed, with the processes that it keeps for large requests."""
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _check_memory(held: list[float], findings: Findings) -> None:
    half = held[len(held) // 2 :]
    print(f"memory: {held[0]:.0f} MiB first, {half[0]:.0f} at half time, {held[-1]:.0f} last, {max(held):.0f} at most")
    if len(half) > 4 and half[-1] - half[0] > MOST_GROWTH:
        findings.add("memory grows", f"{half[0]:.0f} MiB at half time, {half[-1]:.0f} MiB in the end")


# ---- the store -------------------------------------------------------------------------------------------------------


def explore_store(
    store: Any,
    *,
    examples: int,
    seed: int | None = None,
    found: Callable[[str, str], None],
    until: float = float("inf"),
) -> Counter[str]:
    """Ask every operation of the store's OpenAPI document so often; the statuses of the answers."""
    import schemathesis
    from hypothesis import HealthCheck, given, seed as seeded, settings

    from agentlightning.store.http.api import Attendance, StoreApi
    from agentlightning.store.http.intake import Intake

    @schemathesis.serializer("application/vnd.msgpack", "application/x-protobuf")
    def as_bytes(context: object, value: object) -> bytes:
        return value if isinstance(value, bytes) else str(value).encode()

    intake, statuses = Intake(store), Counter[str]()
    app = StoreApi(store, intake, Attendance(store))
    found_operations: Any = schemathesis.openapi.from_asgi("/openapi.json", app).get_all_operations()
    operations = [one.ok() for one in found_operations]
    unhealthy = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    assert len(operations) > 30
    for operation in operations:

        def explore(case: Any) -> None:
            name = case.operation.label
            if time.monotonic() > until:
                return
            if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), int | float):
                case.body["timeout"] %= 0.01  # long polls would take the time of others
            began = time.thread_time()
            try:
                response = case.call()
            except Exception as error:  # the server's, which is a finding as well
                found(f"{name}: {type(error).__name__}", f"{case!r}\n{traceback.format_exc()[-1500:]}")
                return
            statuses[str(response.status_code)] += 1
            if response.status_code >= 500 and response.status_code != 503:
                found(f"{name}: {response.status_code}", f"{case!r} {response.text[:500]}")
            if (took := time.thread_time() - began) > SECONDS_OF_PROCESSOR:
                found(f"{name}: {took:.1f} s of processor time", repr(case))

        limits = settings(max_examples=examples, deadline=None, suppress_health_check=unhealthy, database=None)
        test = limits(given(case=operation.as_strategy())(explore))
        (test if seed is None else seeded(seed)(test))()
    return statuses


async def fuzz_store(seconds: float, seed: int, findings: Findings) -> None:
    from psutil import Process

    from agentlightning.store import SqliteLightningStore

    progress, held = Progress(seconds), list[float]()
    until = progress.began + seconds
    with TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.db")
        for number in itertools.count():
            found = await asyncio.to_thread(
                explore_store, store, examples=40, seed=seed + number, found=findings.add, until=until
            )
            progress.seen.update(found)
            held.append(Process().memory_info().rss / 2**20)
            progress.tell(f"{held[-1]:.0f} MiB")
            if progress.is_over:
                break
        await store.close()
    print(f"answers: {dict(progress.seen)}")
    _check_memory(held, findings)


# ---- files -----------------------------------------------------------------------------------------------------------


def _captured(read: Callable[[Path], None], path: Path, out: Path) -> None:
    """Run in a process of its own, with all that it says in a file."""
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    logging.disable(logging.CRITICAL)
    try:
        read(path)
    finally:
        sys.stdout.flush()


async def fuzz_files(seconds: float, seed: int, findings: Findings) -> None:
    from scripts.damage import make_database

    chance, progress = random.Random(seed), Progress(seconds)
    FORKS.set_forkserver_preload(["agentlightning.learner.policy", "agentlightning.gateway", "agentlightning.store"])
    with TemporaryDirectory(prefix="agl-fuzz-") as name:
        work = Path(name)
        await make_database(work / "whole.db", Babbler)
        while not progress.is_over:
            await asyncio.to_thread(_damage_one, work, chance, findings, progress)
            progress.tell()
    print(f"results: {dict(progress.seen)}")


def _damage_one(work: Path, chance: random.Random, findings: Findings, progress: Progress) -> None:
    """Damage a database, or one of a model's files, and read it."""
    from agentlightning.models import resolve_model
    from scripts.damage import damaged, read_database, read_rendering, read_weights

    if chance.random() < 0.6:
        path = work / "broken.db"
        for old in work.glob("broken.db*"):
            old.unlink()
        path.write_bytes(damaged((work / "whole.db").read_bytes(), chance))
        _read_damaged("database", read_database, path, findings, progress)
        return
    path, whole = work / "model", Path(resolve_model("calc"))
    shutil.copytree(whole, path, dirs_exist_ok=True)
    file = chance.choice(sorted(file for file in path.iterdir() if file.is_file()))
    file.write_bytes(damaged(file.read_bytes(), chance))
    read = chance.choice((read_rendering, read_weights))
    _read_damaged(f"model's {file.name}", read, path, findings, progress)


def _read_damaged(kind: str, read: Callable[[Path], None], path: Path, findings: Findings, progress: Progress) -> None:
    out = path.parent / "said"
    process = FORKS.Process(target=_captured, args=(read, path, out))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
        findings.add(f"{kind}: hangs", _kept(path))
        return
    said = out.read_text(errors="replace")
    result = "failed" if process.exitcode else "refused" if "refused" in said else "read"
    progress.seen[f"{kind.split()[0]} {result}"] += 1
    if process.exitcode:
        last = (said.strip().splitlines() or [f"ended by {process.exitcode}"])[-1]
        findings.add(f"{kind}: {last[:100]}", f"{read.__name__} {_kept(path)}\n{said[-2500:]}")


def _kept(path: Path) -> str:
    """A copy of what brought a finding."""
    kept = Path(mkdtemp(prefix="agl-finding-")) / path.name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, kept)
    return str(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", choices=("gateway", "store", "files"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        asyncio.run(be_the_gateway())
        return
    if given.target is None:
        parser.error("say what: gateway, store or files")
    findings = Findings()
    work = {"gateway": fuzz_gateway, "store": fuzz_store, "files": fuzz_files}[given.target]
    asyncio.run(work(given.seconds, given.seed, findings))
    print(
        f"{given.target}: {sum(findings.count.values())} findings of {len(findings.count)} kinds in {given.seconds:g} s"
    )
    for kind, count in findings.count.most_common():
        print(f"  {count:>6}  {kind}")
    sys.exit(bool(findings.count))


if __name__ == "__main__":
    main()
