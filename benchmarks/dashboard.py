"""How quick the dashboard is with many rollouts, and what it costs a run that is watched.

    python benchmarks/dashboard.py [--quick] [--json]

100,000 finished rollouts (`--quick`: 10,000) are written into a store's file; a server shows them, and a client asks
as the pages do. Keys: `open_ms` (the table's first page and its count, as when it is opened), `page_ms` (the median of
following pages), `deep_page_ms` (a page after 90 % of all), `worst_ms` (the slowest of the filters: a rare outcome, a
text that is nowhere, rewards from the top, one step); where Chromium and playwright are installed also `browser_ms`
(from the address to the rows on the screen) and `browser_cpu_ms` (what of it the page's own thread computed).
`watched_percent`: how much more processor time steps of the calculator
agent take in the run's own process, which holds the store and its server, while a run's page and the table are open,
and `watched_model_percent` in the process that computes; pages are open during every other pair of steps of one run;
medians. Processor time, not the clock's: other work on the machine hardly changes it. `watched_ms`: the same as
milliseconds per step. Where Linux's /proc is missing these are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from agentlightning.dashboard import served_with_dashboard
from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Run

ROOT = Path(__file__).parents[1]
PER_STEP = 100
REPEATS = 15
_ROLLOUT = (
    "INSERT INTO rollouts (rollout_id, input, mode, status, metadata, start_time, end_time, attempts, "
    "latest_attempt_id, failures, infra_failures, run_id, step, group_id, reward) "
    "VALUES (?, ?, 'train', 'succeeded', ?, ?, ?, 1, ?, 0, 0, 'run', ?, ?, ?)"
)
_ATTEMPT = (
    "INSERT INTO attempts (attempt_id, rollout_id, sequence_id, start_time, end_time, status, worker_id, outcome, "
    "next_span, lease, timeout_at) VALUES (?, ?, 1, ?, ?, 'succeeded', 'w', ?, 5, 60, 0)"
)


async def fill(path: Path, count: int) -> None:
    """Write finished rollouts straight into the file: a hundred thousand life cycles would take minutes."""
    store = SqliteLightningStore(path)
    await store.begin_run(Run(run_id="run", algorithm="GRPO", agent="agent", settings={"model": "calc"}))
    await store.close()
    chance = random.Random(0)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for start in range(0, count, 10_000):
            rollouts, attempts = [], []
            for n in range(start, min(start + 10_000, count)):
                step, group, began = n // PER_STEP, f"{n // PER_STEP}-{n % PER_STEP // 8}", 1.7e9 + n
                task = json.dumps({"question": f"What is {n} * 7, said at length?" * 5, "answer": n * 7})
                metadata = json.dumps({"step": step, "group": group})
                ids = f"ro-{n:08}", f"at-{n:08}"
                outcome = "timeout" if n % 9973 == 0 else "ok"
                rollouts.append((ids[0], task, metadata, began, began + 2, ids[1], step, group, chance.random()))
                attempts.append((ids[1], ids[0], began, began + 2, outcome))
            connection.executemany(_ROLLOUT, rollouts)
            connection.executemany(_ATTEMPT, attempts)
            connection.commit()


async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = await work()
    return (time.perf_counter() - began) * 1000, found


async def measure_table(folder: Path, count: int) -> dict[str, float]:
    store = SqliteLightningStore(folder / "store.db")
    server = served_with_dashboard(store, port=0)
    await server.start()
    async with aiohttp.ClientSession(f"{server.endpoint}/dashboard/api/") as session:

        async def ask(path: str, **params: Any) -> Any:
            async with session.get(path, params={"run": "run", **params}) as response:
                return json.loads(await response.read())

        async def median(path: str, **params: Any) -> float:
            return statistics.median([(await timed(lambda: ask(path, **params)))[0] for _ in range(5)])

        opened, _ = await timed(lambda: asyncio.gather(ask("rollouts"), ask("rollouts/count")))
        pages, page = [], await ask("rollouts")
        for _ in range(REPEATS):
            cursor = page["next"]
            took, page = await timed(lambda cursor=cursor: ask("rollouts", cursor=cursor))
            pages.append(took)
        reached = await ask("rollouts", sort="step", limit=500)
        while reached["next"] and reached["rollouts"][0]["step"] > count // PER_STEP // 10:
            reached = await ask("rollouts", sort="step", limit=500, cursor=reached["next"])
        deep, _ = await timed(lambda: ask("rollouts", sort="step", cursor=reached["next"]))
        filters = {
            "a rare outcome": {"outcome": "timeout"},
            "a text that is nowhere": {"q": "nowhere to be found"},
            "rewards from the top": {"sort": "reward"},
            "one step": {"step": count // PER_STEP // 2},
            "low rewards": {"reward_max": "0.0005"},
        }
        slow = {name: await median("rollouts", **given) for name, given in filters.items()}
        for name, took in slow.items():
            print(f"  {name:<24} {took:8.1f} ms")
        found = {"open_ms": opened, "page_ms": statistics.median(pages), "deep_page_ms": deep}
        found["worst_ms"] = max(slow.values())
        shown = await asyncio.to_thread(in_browser, server.endpoint)
    await server.stop()
    await store.close()
    return found | shown


def in_browser(endpoint: str) -> dict[str, float]:
    """Milliseconds until the rows are on the screen; nothing without a browser. The second visit, with files cached."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    if chromium is None:
        return {}
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        devtools = page.context.new_cdp_session(page)
        devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
        took = 0.0
        for _ in range(2):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{endpoint}/dashboard/rollouts")
            page.locator("tbody tr").nth(20).wait_for()
            took = (time.perf_counter() - began) * 1000
        measured = {one["name"]: one["value"] for one in devtools.send("Performance.getMetrics")["metrics"]}
        browser.close()
    return {"browser_ms": took, "browser_cpu_ms": measured["TaskDuration"] * 1000}


# ---- what it costs a run ---------------------------------------------------------------------------------------------


async def watch(url: str, seen: Callable[[], bool], over: asyncio.Event) -> None:
    """As two open pages do, the run's and the table: hear the news and read what changed, while they are `seen`."""
    async with aiohttp.ClientSession() as session:
        (run,) = [r for r in (await _get(session, f"{url}/api/runs"))["runs"] if r["elsewhere"] is None]
        at, last = f"{url}/api/runs/{run['run_id']}", 0
        while not over.is_set():
            if not seen():
                await asyncio.sleep(0.05)
                continue
            opened = at, f"{at}/events", f"{url}/api/why?run={run['run_id']}"
            await asyncio.gather(*(_get(session, path) for path in opened))
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/api/news", timeout=aiohttp.ClientTimeout(sock_read=5)) as news:
                    async for line in news.content:
                        if not seen() or over.is_set():
                            break
                        if not line.startswith(b"data: "):
                            continue
                        step = json.loads(line.removeprefix(b"data: "))["runs"][run["run_id"]]["step"] or 0
                        paths = [f"{url}/api/rollouts?limit=50", f"{url}/api/rollouts/count"]
                        paths += [at, f"{at}/steps?from={last}"] if step != last else []
                        last = step
                        await asyncio.gather(*(_get(session, path) for path in paths))


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return json.loads(await response.read())


def processor_seconds(process: int) -> float | None:
    """What a process has used of the processor so far; None where the system does not tell."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def model_process(process: int) -> int | None:
    """The child that has used most of the processor: it holds the weights."""
    try:
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    except OSError:
        return None
    return max(map(int, children), key=lambda child: processor_seconds(child) or 0.0, default=None)


def steps_in(metrics: Path) -> int:
    return len(read_metrics(metrics)) if metrics.exists() else 0


async def record(process: int, metrics: Path, over: asyncio.Event) -> list[tuple[float, float]]:
    """The processor time of the run and of its model at the end of each step."""
    found: list[tuple[float, float]] = []
    while not over.is_set():
        if steps_in(metrics) > len(found):
            model = model_process(process)
            own, computing = processor_seconds(process), None if model is None else processor_seconds(model)
            if own is None or computing is None:
                return []
            found.append((own, computing))
        await asyncio.sleep(0.02)
    return found


async def measure_watched(folder: Path, steps: int) -> dict[str, float]:
    """By how much a step costs more while it is watched."""
    command = [sys.executable, "-m", "agentlightning", "demo", "calc", "--run-dir", str(folder), "--steps", str(steps)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    found = re.search(r"Dashboard: (\S+)/$", (await process.stdout.readline()).decode().strip())
    assert found is not None, "the first line is the dashboard's address"
    metrics, over = folder / "metrics.jsonl", asyncio.Event()

    def seen() -> bool:
        """During every other pair of steps."""
        return steps_in(metrics) > 0 and steps_in(metrics) % 4 < 2

    watching = asyncio.create_task(watch(found[1], seen, over))
    recording = asyncio.create_task(record(process.pid, metrics, over))
    await process.stdout.read()
    await process.wait()
    over.set()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return compared(await recording)


def compared(recorded: list[tuple[float, float]]) -> dict[str, float]:
    """Steps with pages open beside those without. The line before a step's own decided whether pages were open."""
    took: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for number, (before, after) in enumerate(itertools.pairwise(recorded), 1):
        if number > 1:
            took[number % 4 < 2].append((after[0] - before[0], after[1] - before[1]))
    if not took[True] or not took[False]:
        return {}
    (own, model), (own_seen, model_seen) = (
        [statistics.median(part) for part in zip(*took[watched], strict=True)] for watched in (False, True)
    )
    print(f"  processor per step: run {own:.3f} s, watched {own_seen:.3f} s; model {model:.3f} s, {model_seen:.3f} s")
    return {
        "watched_percent": (own_seen / own - 1) * 100,
        "watched_model_percent": (model_seen / model - 1) * 100,
        "watched_ms": (own_seen - own) * 1000,
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="10,000 rollouts and a short run")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    options = parser.parse_args()
    count, steps = (10_000, 8) if options.quick else (100_000, 48)
    with TemporaryDirectory() as folder:
        await fill(Path(folder) / "store.db", count)
        print(f"{count:,} rollouts")
        figures = await measure_table(Path(folder), count)
        figures |= await measure_watched(Path(folder) / "run", steps)
    for name, figure in figures.items():
        print(f"{name:<18} {figure:8.1f}")
    if options.json:
        print(json.dumps({name: round(figure, 2) for name, figure in figures.items()}))


if __name__ == "__main__":
    asyncio.run(main())
