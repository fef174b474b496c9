"""What clients of the fine-tuning API cost the job that trains: the time of a step alone, and while 50 clients poll the
events of their jobs and eight more jobs wait in the queue.

    python benchmarks/finetuning.py [--quick] [--json]

A server as it is typed, supervised jobs on the calculator model, alone and polled in turn; a step's time is the median
of a job's. Each client asks every two seconds over a connection of its own. `request_ms` is the processor time of the
server for a question, where Linux's /proc says it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai

CHAT = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "7"}]
POLLERS, QUEUED, EVERY = 50, 8, 2.0


@asynccontextmanager
async def server(folder: Path) -> AsyncIterator[tuple[str, int]]:
    """`agl serve --training`; its base URL and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["calc", "--training", str(folder / "served"), "--port", str(port), "--no-key"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "agentlightning", "serve", *options, stdout=log, stderr=subprocess.STDOUT
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            while True:
                try:
                    await client.models.list()
                    break
                except openai.APIConnectionError:
                    await asyncio.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        await process.wait()


async def ended(client: openai.AsyncOpenAI, job: str) -> None:
    """Wait until a job has ended. Raises RuntimeError for one that failed."""
    for _ in range(3600):
        found = await client.fine_tuning.jobs.retrieve(job)
        if found.status == "failed":
            raise RuntimeError(str(found.error))
        if found.status in ("succeeded", "cancelled"):
            return
        await asyncio.sleep(0.5)
    raise RuntimeError(f"The job {job} did not end within half an hour.")


async def poll(url: str, jobs: list[str], asked: list[int]) -> None:
    """Ask for events again and again, until it is cancelled; counts the questions."""
    async with aiohttp.ClientSession() as session:
        for job in itertools.cycle(jobs):
            async with session.get(f"{url}/fine_tuning/jobs/{job}/events?limit=20") as answer:
                await answer.read()
            asked[0] += 1
            await asyncio.sleep(EVERY)


def processor_seconds(pid: int) -> float:
    """What a process has computed; 0 where that is not known."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


async def step_seconds(url: str, folder: Path, epochs: int, asked: list[int], *, polled: bool) -> float:
    """The median time of one job's steps."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        lines = "\n".join(json.dumps({"messages": CHAT}) for _ in range(64)).encode()
        file = await client.files.create(file=("chats.jsonl", lines), purpose="fine-tune")
        method: Any = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": epochs, "batch_size": 8}}}
        job = await client.fine_tuning.jobs.create(model="calc", training_file=file.id, method=method)
        waiting = [
            (await client.fine_tuning.jobs.create(model="calc", training_file=file.id, method=method)).id
            for _ in range(QUEUED if polled else 0)
        ]
        pollers = [asyncio.create_task(poll(url, [job.id, *waiting], asked)) for _ in range(POLLERS if polled else 0)]
        await ended(client, job.id)
        for task in pollers:
            task.cancel()
        await asyncio.gather(*pollers, return_exceptions=True)
        for one in waiting:
            await client.fine_tuning.jobs.cancel(one)
    rows = [json.loads(line) for line in (folder / "served/runs" / job.id / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if row.get("step") and "time" in row]
    return statistics.median(late - early for early, late in itertools.pairwise(times[1:]))


async def measured(epochs: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        alone: list[float] = []
        polled: list[float] = []
        computed = 0.0
        asked = [0]
        async with server(folder) as (url, pid):
            for _ in range(rounds):
                alone.append(await step_seconds(url, folder, epochs, asked, polled=False))
                before = processor_seconds(pid)
                polled.append(await step_seconds(url, folder, epochs, asked, polled=True))
                computed += processor_seconds(pid) - before
    ratios = [b / a for a, b in zip(alone, polled, strict=True)]
    return {
        "alone_ms": 1000 * statistics.median(alone),
        "polled_ms": 1000 * statistics.median(polled),
        "request_ms": 1000 * computed / max(asked[0], 1),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of a short job")
    parser.add_argument("--json", action="store_true", help="the figures as a last line")
    options = parser.parse_args()
    found = asyncio.run(measured(4, 1) if options.quick else measured(20, 5))
    print(f"a step alone                              {found['alone_ms']:8.1f} ms")
    print(f"with {POLLERS} clients polling, {QUEUED} jobs queued    {found['polled_ms']:8.1f} ms")
    print(f"ratio (median)                            {found['ratio']:8.2f}")
    print(f"  of the rounds                  {found['ratio_low']:8.2f} {found['ratio_high']:8.2f}")
    print(f"the server's work for a question          {found['request_ms']:8.2f} ms of processor time")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
