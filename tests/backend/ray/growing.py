"""`python -m tests.backend.ray.growing`: engines that come with a machine, and leave with it, told beforehand or not.

One machine has room for a learner and an engine. A second one joins, drains while its engines sample, joins again and
is lost. What came of it is a line of JSON.
"""
# ruff: noqa: ASYNC110 - a wait of a test

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from typing import Any

import numpy as np
from ray._private.state import state  # pyright: ignore[reportMissingImports]
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]
from ray.core.generated import autoscaler_pb2  # pyright: ignore[reportMissingImports]

from agentlightning.backend import POLICY, ModelSpec
from agentlightning.backend.ray.backend import RayBackend
from agentlightning.engine.base import SamplingParams, concat
from agentlightning.learner.base import LossConfig, OptimParams

from ...engine.test_model_process import row
from .several_engines import PROMPT, STORE, sample, samplers

LONG = 300
"""Tokens of a response that a machine's notice comes in the middle of."""


def drain(node: str, seconds: float) -> bool:
    """Tell Ray that a machine will be gone in so many seconds, as a cloud does."""
    import ray  # pyright: ignore[reportMissingImports]

    client = ray._private.worker.global_worker.gcs_client
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, _ = client.drain_node(node, reason, "a test", int((time.time() + seconds) * 1000))
    assert node in state.get_draining_nodes()
    return bool(accepted)


async def until(backend: RayBackend, engines: int) -> None:
    """So many are there, and all sample."""
    async with asyncio.timeout(240):
        while not len(samplers(backend)) == len(backend.sampling.fleet.ready) == engines:
            await asyncio.sleep(0.1)


async def learn(backend: RayBackend) -> list[float]:
    """A step from a sample of any engine; of every engine, how far it is from the learner after the publication."""
    learner = backend.learner(POLICY)
    await learner.forward_backward([row(PROMPT, await sample(samplers(backend)[0]))], LossConfig(name="reinforce"))
    await learner.optim_step(OptimParams(learning_rate=3e-3))
    await backend.publish(POLICY)
    return [await gap(backend, await sample(one)) for one in samplers(backend)]


async def gap(backend: RayBackend, chunk: Any) -> float:
    plain = await backend.learner(POLICY).forward(row(PROMPT, chunk))
    return float(np.abs(plain - chunk.plain_logprobs).max())


async def long_ones(backend: RayBackend, count: int) -> list[int]:
    """Lengths of so many long responses that the backend's engines sample at once."""

    async def one(number: int) -> int:
        params = SamplingParams(max_tokens=LONG, seed=number, owner=str(number), ignore_eos=True)
        engine = backend.engine(POLICY)
        return len(concat([chunk async for chunk in engine.generate(PROMPT, params)]).ids)

    return await asyncio.gather(*(one(number) for number in range(count)))


async def follow(cluster: Cluster, backend: RayBackend, found: dict[str, Any]) -> None:
    first = await sample(samplers(backend)[0])
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    await asyncio.sleep(5)
    found["before the first request"] = len(samplers(backend))
    found["gaps"] += await learn(backend)
    await long_ones(backend, 1)
    await until(backend, 3)
    found["gaps"] += await learn(backend)
    found["concurrency"] = (await backend.engine(POLICY).info()).max_concurrency
    sampling = asyncio.create_task(long_ones(backend, 24))
    while not all(one.running for one in samplers(backend)):
        await asyncio.sleep(0.01)
    found["draining"] = drain(node.node_id, 120)
    await until(backend, 1)
    found["lengths"] = await sampling
    found["gaps"] += await learn(backend)
    cluster.remove_node(node)
    node = cluster.add_node(num_cpus=2, object_store_memory=STORE)
    await until(backend, 3)
    cluster.remove_node(node, allow_graceful=False)
    await until(backend, 1)
    found["gaps"] += await learn(backend)
    found["moved"] = await gap(backend, first)


async def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE})
    found: dict[str, Any] = {"gaps": []}
    try:
        spec = ModelSpec(
            model="calc",
            device="cpu",
            max_context=512,
            max_concurrency=8,
            seed=0,
            backend_options={"address": str(cluster.address), "engines": "auto"},
        )
        backend = RayBackend(spec)
        await backend.start()
        try:
            await follow(cluster, backend, found)
        finally:
            await backend.close()
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
