"""How fast the store is: life cycles per second in process and over HTTP, wide spans, growth, memory.

A life cycle is enqueue, claim, four model calls of 256 + 64 token ids with a span of about 600 characters each, finish.
    python benchmarks/store.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from agentlightning.store import LightningStore, SqliteLightningStore
from agentlightning.types import AttemptStatus, CallInfo, CallRecord, RolloutMode, Segment, Span, VersionRun

TEXT = "The agent looked at the tool's answer and went on. " * 12


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


def call_record(rollout_id: str, attempt_id: str, turn: int, prompt: int, response: int) -> CallRecord:
    """One turn that continues the last one."""
    info = CallInfo(
        call_id=f"c{turn}:0",
        response_id=f"c{turn}",
        rollout_id=rollout_id,
        attempt_id=attempt_id,
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
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        name="chat policy",
    )
    return CallRecord(info, f"p{turn}", f"r{turn}", turn_segments(turn, prompt, response), span)


async def life_cycle(store: LightningStore, worker: str, prompt: int = 256, response: int = 64) -> None:
    await store.enqueue_rollout({"question": "What is 12 * 7?", "answer": 84}, mode=RolloutMode.TRAIN)
    claim = await store.dequeue_rollout(worker, timeout=5.0)
    assert claim is not None
    rollout_id, attempt_id = claim.rollout_id, claim.attempt.attempt_id
    await store.add_calls([call_record(rollout_id, attempt_id, turn, prompt, response) for turn in range(4)])
    await store.update_attempt(rollout_id, attempt_id, status=AttemptStatus.SUCCEEDED)


async def throughput(cycle: Callable[[str], Awaitable[None]], clients: int, seconds: float) -> float:
    """Life cycles per second."""
    end = time.perf_counter() + seconds
    done = 0

    async def client(name: str) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await cycle(name)
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*[client(f"worker-{n}") for n in range(clients)])
    return done / (time.perf_counter() - start)


async def main(args: argparse.Namespace) -> None:
    seconds = 2.0 if args.quick else 8.0
    with TemporaryDirectory() as folder:
        store = SqliteLightningStore(Path(folder) / "store.db")
        rps = await throughput(lambda name: life_cycle(store, name), 32, seconds)
        print(f"in process: {rps:.0f} rollouts/s")
        wide = await throughput(lambda name: life_cycle(store, name, 4096, 64), 32, seconds)
        print(f"wide: {wide:.0f} rollouts/s, ratio {wide / rps:.2f}")
        await store.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    asyncio.run(main(parser.parse_args()))
