"""The life cycle of `benchmarks/store.py` on the store of agentlightning 0.3.0, run by that package's own interpreter.

    pip install agentlightning==0.3.0        # in an environment of its own
    python benchmarks/store.py --peer path/to/that/python

Prints one JSON object. Token ids are span attributes there, which is how that store keeps them.
"""
# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import time

from agentlightning.store.client_server import LightningStoreClient, LightningStoreServer
from agentlightning.store.memory import InMemoryLightningStore

from agentlightning.types import Span

TEXT = "The agent looked at the tool's answer and went on. " * 12
TASK = {"question": "What is 12 * 7?", "answer": 84}
CALLS = 4
IDS, LOGPROBS = list(range(320)), [-0.5] * 64


async def life_cycle(store, worker: str) -> None:
    await store.enqueue_rollout(TASK, mode="train")
    while (claim := await store.dequeue_rollout(worker)) is None:  # noqa: ASYNC110 - its claims do not wait
        await asyncio.sleep(0.001)
    spans = [
        Span.from_attributes(
            attributes={
                "gen_ai.response.id": f"c{turn}",
                "gen_ai.output.messages": TEXT,
                "prompt_token_ids": IDS[:256],
                "response_token_ids": IDS[256:],
                "logprobs": LOGPROBS,
            },
            rollout_id=claim.rollout_id,
            attempt_id=claim.attempt.attempt_id,
            sequence_id=turn + 1,
            name="chat policy",
        )
        for turn in range(CALLS)
    ]
    await store.add_many_spans(spans)
    await store.update_attempt(claim.rollout_id, claim.attempt.attempt_id, status="succeeded")


async def throughput(store, clients: int, seconds: float) -> float:
    end = time.perf_counter() + seconds
    done = 0

    async def client(name: str) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await life_cycle(store, name)
            done += 1

    start = time.perf_counter()
    await asyncio.gather(*[client(f"worker-{n}") for n in range(clients)])
    return done / (time.perf_counter() - start)


def serve(port: int) -> None:
    async def run() -> None:
        server = LightningStoreServer(InMemoryLightningStore(), host="127.0.0.1", port=port)
        await server.start()
        await asyncio.Event().wait()

    asyncio.run(run())


async def over_http(seconds: float) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("fork").Process(target=serve, args=(port,), daemon=True)
    process.start()
    client = LightningStoreClient(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 60
    while True:
        try:
            await client.query_rollouts()
            break
        except Exception:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
    figures = {f"http_rps_{clients}": await throughput(client, clients, seconds) for clients in (8, 32)}
    await client.close()
    process.kill()
    return figures


async def main(seconds: float) -> None:
    figures = {"in_process_rps": await throughput(InMemoryLightningStore(), 32, seconds)}
    figures |= await over_http(seconds)
    print(json.dumps(figures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    asyncio.run(main(parser.parse_args().seconds))
