"""The demo from start to end, for one seed or several: does it learn, how long does it take, where does the time go?

    python benchmarks/demo.py [--seeds 5] [--quick] [--json]

Each seed is a fresh `agl demo calc` process in a temporary folder. "idle" is the model process with nothing to do: the
agents, their HTTP client, the gateway and the store are at work. The official client's own share of that is measured
apart, against a server that does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentlightning.metrics import read_metrics

PROBE_CONCURRENCY = 16
PROBE_CALLS = 25


def run_demo(seed: int, quick: bool, folder: Path) -> dict[str, float]:
    """One demo; its figures."""
    command = [sys.executable, "-m", "agentlightning", "demo", "calc", "--seed", str(seed), "--run-dir", str(folder)]
    began = time.perf_counter()
    done = subprocess.run([*command, *(["--steps", "5"] if quick else [])], capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"the demo failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return {"seconds": seconds, **figures(read_metrics(folder / "metrics.jsonl"))}


def figures(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Rewards before and after, and shares of the model process's time."""
    validated = [m["val_reward"] for m in rows if m.get("val_reward") is not None]
    last = rows[-1]
    parts = {name: last[f"model_{name}_seconds"] for name in ("sampling", "learning", "idle")}
    whole = sum(parts.values())
    return {
        "training_seconds": last["time"] - rows[0]["time"],
        "reward_before": validated[0],
        "reward_after": validated[-1],
        "share_sampling": parts["sampling"] / whole,
        "share_learning": parts["learning"] / whole,
        "share_other": parts["idle"] / whole,
        "calls": sum(m.get("calls", 0) for m in rows),
    }


class IdleServer(threading.Thread):
    """Answers every request on its connections with the same tool call, from a thread of its own."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}/v1"
        call = {"id": "c", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "finish_reason": "tool_calls", "message": message}
        usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(answer).encode()
        head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.response = head.encode() + body

    def run(self) -> None:
        with self.listening:
            while True:
                connection, _ = self.listening.accept()
                threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while line := reader.readline():
                length = 0
                while line not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line[15:])
                    line = reader.readline()
                reader.read(length)
                connection.sendall(self.response)


async def client_cpu_seconds() -> float:
    """CPU of this thread for one call of the official client with a tool; the server's thread is not counted."""
    from openai import AsyncOpenAI

    server = IdleServer()
    server.start()
    messages: Any = [{"role": "user", "content": "What is 1 + 2?"}]
    tools: Any = [{"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}]
    async with AsyncOpenAI(base_url=server.url, api_key="x") as client:

        async def call_in_a_row(calls: int) -> None:
            for _ in range(calls):
                await client.chat.completions.create(model="m", messages=messages, tools=tools)

        await asyncio.gather(*(call_in_a_row(3) for _ in range(PROBE_CONCURRENCY)))  # warms up
        began = time.thread_time()
        await asyncio.gather(*(call_in_a_row(PROBE_CALLS) for _ in range(PROBE_CONCURRENCY)))
        return (time.thread_time() - began) / (PROBE_CALLS * PROBE_CONCURRENCY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="how many runs, with the seeds 0, 1, …")
    parser.add_argument("--quick", action="store_true", help="5 steps instead of a whole run")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object at the end")
    options = parser.parse_args()
    per_call = asyncio.run(client_cpu_seconds())
    runs: list[dict[str, float]] = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run_demo(seed, options.quick, Path(folder) / "run"))
            print(f"seed {seed}: {runs[-1]['reward_before']:.2f} → {runs[-1]['reward_after']:.2f}", flush=True)
    show(runs, per_call)
    if options.json:
        mean = {key: statistics.mean(run[key] for run in runs) for key in runs[0]}
        reached = sum(run["reward_before"] < 0.5 and run["reward_after"] >= 0.9 for run in runs)
        print(json.dumps({**mean, "seeds_reached": reached, "seeds": len(runs), "client_cpu_ms": 1e3 * per_call}))


def show(runs: list[dict[str, float]], per_call: float) -> None:
    table = Table("seed", "before", "after", "total s", "training s", "sampling", "learning", "idle", "openai client*")
    for seed, run in enumerate(runs):
        client = run["calls"] * per_call / run["training_seconds"]
        shares = [f"{run[f'share_{name}']:.0%}" for name in ("sampling", "learning", "other")]
        rewards = [f"{run[f'reward_{name}']:.3f}" for name in ("before", "after")]
        table.add_row(
            str(seed), *rewards, f"{run['seconds']:.0f}", f"{run['training_seconds']:.0f}", *shares, f"{client:.0%}"
        )
    Console(width=120).print(table)
    print(f"* CPU of the official client, {1e3 * per_call:.1f} ms a call, as a share of the training's wall clock")


if __name__ == "__main__":
    main()
