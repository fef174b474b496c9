"""`python -m tests.backend.ray.several_engines ENGINES NODES RUNS [clean]`: engines that share machines.

So many runs at once on one local cluster of so many nodes, each with so many engines, learn and publish three times.
Every engine is asked by itself after each publication. `clean`: a run's weights are removed on their way, in the
second step once, in the third until an engine is ended for it. What came of it is a line of JSON.
"""
# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from agentlightning.backend import POLICY, ModelSpec
from agentlightning.backend.ray.backend import RayBackend
from agentlightning.backend.ray.engines import ReplicaSampler
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.learner.base import LossConfig, OptimParams

from ...engine.test_model_process import row

STORE = 100 << 20
PROMPT = np.arange(20, 200, dtype=np.int32)
STEPS = 3


def samplers(backend: RayBackend) -> list[ReplicaSampler]:
    return [one for one in backend.sampling.fleet.replicas if isinstance(one, ReplicaSampler)]


async def sample(sampler: ReplicaSampler) -> Chunk:
    assert sampler.process is not None
    params = SamplingParams(max_tokens=8, seed=3)
    return concat([chunk async for chunk in sampler.process.policy(POLICY).generate(PROMPT, params)])


async def all_ready(backend: RayBackend) -> None:
    async with asyncio.timeout(240):
        while len(backend.sampling.fleet.ready) < len(backend.sampling.fleet.replicas):
            await asyncio.sleep(0.05)


def copies(backend: RayBackend) -> list[Path]:
    """Of weights on their way, on this machine."""
    return list(Path(backend._folder).glob(f"{POLICY}-*-*"))  # pyright: ignore[reportPrivateUsage]


async def clean(backend: RayBackend, publishing: asyncio.Task[int], times: int) -> int:
    """A program that removes weights from the machine so many times, until an engine is ended; how often it did."""
    hosts, gone = [sampler.host for sampler in samplers(backend)], 0
    while gone < times and not publishing.done() and hosts == [sampler.host for sampler in samplers(backend)]:
        for copy in copies(backend):
            shutil.rmtree(copy, ignore_errors=True)
            gone += 1
        await asyncio.sleep(0.001)
    return gone


async def learn(backend: RayBackend, found: dict[str, Any], *, cleaned: bool) -> None:
    learner = backend.learner(POLICY)
    first = await sample(samplers(backend)[0])
    for step in range(1, STEPS + 1):
        await learner.forward_backward([row(PROMPT, await sample(samplers(backend)[0]))], LossConfig(name="reinforce"))
        await learner.optim_step(OptimParams(learning_rate=3e-3))
        publishing = asyncio.create_task(backend.publish(POLICY))
        if cleaned and step > 1:
            found["cleaned"].append(await clean(backend, publishing, times=1 if step == 2 else 10_000))
        await publishing
        await all_ready(backend)
        for sampler in samplers(backend):
            chunk = await sample(sampler)
            gaps = np.abs(await learner.forward(row(PROMPT, chunk)) - chunk.plain_logprobs)
            found["gaps"].append(float(gaps.max()))
            found["versions"].append(chunk.version)
        found["left"] += [path.name for path in copies(backend)]
        stats = await backend.stats()
        found["bytes"].append(stats.published_bytes)
        found["seconds"].append(dict(stats.publication_seconds))
    found["moved"] = float(np.abs(await learner.forward(row(PROMPT, first)) - first.plain_logprobs).max())


async def run(engines: int, address: str, *, cleaned: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"gaps": [], "versions": [], "left": [], "cleaned": [], "bytes": [], "seconds": []}
    options = {"address": address, "engines": engines, "cpus_per_engine": 0.5, "cpus_per_rank": 0.5}
    spec = ModelSpec(model="calc", device="cpu", max_context=512, seed=0, backend_options={**options, "restarts": 20})
    backend = RayBackend(spec)
    await backend.start()
    try:
        await learn(backend, found, cleaned=cleaned)
    finally:
        await backend.close()
    found["left"] += [str(path) for path in [Path(backend._folder)] if path.exists()]  # pyright: ignore
    return found


async def main(engines: int, nodes: int, runs: int, *, cleaned: bool) -> None:
    logging.basicConfig(level=logging.INFO)
    cpus = max(1, round((engines + 1) * runs / 2 / nodes + 0.5))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus, "object_store_memory": STORE})
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=cpus, object_store_memory=STORE)
        address = str(cluster.address)
        async with asyncio.timeout(450):
            found = await asyncio.gather(*(run(engines, address, cleaned=cleaned) for _ in range(runs)))
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    engines, nodes, runs = map(int, sys.argv[1:4])
    asyncio.run(main(engines, nodes, runs, cleaned="clean" in sys.argv))
