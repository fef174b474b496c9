"""How quick the dashboard is with many rollouts, and what it costs a run that is watched.

    python benchmarks/dashboard.py [--quick] [--json]

100,000 finished rollouts (`--quick`: 10,000) are written into a store's file; a server shows them, and a client asks
as the pages do. Keys: `open_ms` (the table's first page and its count, as when it is opened), `page_ms` (the median of
following pages), `deep_page_ms` (a page after 90 % of all), `worst_ms` (the slowest of the filters: a rare outcome, a
text that is nowhere, rewards from the top, one step); where Chromium and playwright are installed also `browser_ms`
(from the address to the rows on the screen). `watched_percent`: by how much steps of the calculator agent take longer
while pages are open, which they are during every other pair of steps of one run; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
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
    return found if shown is None else {**found, "browser_ms": shown}


def in_browser(endpoint: str) -> float | None:
    """Milliseconds until the rows are on the screen; None without a browser. The second visit, with files cached."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        took = 0.0
        for _ in range(2):
            page.goto("about:blank")
            began = time.perf_counter()
            page.goto(f"{endpoint}/dashboard/rollouts")
            page.locator("tbody tr").nth(20).wait_for()
            took = (time.perf_counter() - began) * 1000
        browser.close()
    return took


# ---- what it costs a run ---------------------------------------------------------------------------------------------


async def watch(url: str, seen: Callable[[], bool], over: asyncio.Event) -> None:
    """As an open page does: hear the news and read again what changed, while `seen` says so."""
    async with aiohttp.ClientSession() as session:
        (run,) = [r for r in (await _get(session, f"{url}/api/runs"))["runs"] if r["elsewhere"] is None]
        paths = (
            f"/runs/{run['run_id']}/steps",
            f"/runs/{run['run_id']}/events",
            "/rollouts?limit=50",
            "/rollouts/count",
        )
        while not over.is_set():
            if not seen():
                await asyncio.sleep(0.05)
                continue
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{url}/api/news", timeout=aiohttp.ClientTimeout(sock_read=5)) as news:
                    async for line in news.content:
                        if not seen() or over.is_set():
                            break
                        if line.startswith(b"data: "):
                            await asyncio.gather(*(_get(session, f"{url}/api{path}") for path in paths))


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        return json.loads(await response.read())


async def measure_watched(folder: Path, steps: int) -> float:
    """Percent that a step takes longer while it is watched."""
    command = [sys.executable, "-m", "agentlightning", "demo", "calc", "--run-dir", str(folder), "--steps", str(steps)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    found = re.search(r"Dashboard: (\S+)/$", (await process.stdout.readline()).decode().strip())
    assert found is not None, "the first line is the dashboard's address"
    metrics, over = folder / "metrics.jsonl", asyncio.Event()

    def seen() -> bool:
        """During every other pair of steps."""
        return metrics.exists() and len(read_metrics(metrics)) % 4 < 2

    watching = asyncio.create_task(watch(found[1], seen, over))
    await process.stdout.read()
    await process.wait()
    over.set()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    took: dict[bool, list[float]] = {True: [], False: []}
    for number, row in enumerate(read_metrics(metrics)):
        if row["step"] > 1:  # the line before this one decided whether pages were open
            took[number % 4 < 2].append(row["sampling_seconds"] + row["learning_seconds"])
    return (statistics.median(took[True]) / statistics.median(took[False]) - 1) * 100


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
        figures["watched_percent"] = await measure_watched(Path(folder) / "run", steps)
    for name, figure in figures.items():
        print(f"{name:<18} {figure:8.1f}")
    if options.json:
        print(json.dumps({name: round(figure, 2) for name, figure in figures.items()}))


if __name__ == "__main__":
    asyncio.run(main())
