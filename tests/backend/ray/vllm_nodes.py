"""`python -m tests.backend.ray.vllm_nodes VLLM RANK [RUN_DIR STEPS]`: vLLM servers on a local cluster.

The learner is on one node, the server on another, and nothing on the head. RANK is that of an adapter; 0 trains all
weights. Without RUN_DIR it learns twice from a prompt. In between the server's actor is killed (kill -9) with a request
under way; at last its node is, and another one joins. What came of it is a line of JSON. With RUN_DIR the calculator
agent trains so many steps.
"""
# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

import agentlightning as agl
from agentlightning.backend import POLICY, ModelSpec
from agentlightning.backend.ray.backend import RayBackend
from agentlightning.backend.ray.on_vllm import PlacedServer
from agentlightning.backend.vllm.replica import Replica
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.example import load_example

from ...engine.test_model_process import row
from .three_nodes import pids_of

STORE = 100 << 20
PROMPT = np.arange(20, 200, dtype=np.int32)
ON_A_CPU = {
    "args": ["--enforce-eager"],
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}


def options(program: str, address: str) -> dict[str, Any]:
    placed = {"address": address, "placement": "STRICT_SPREAD", "start_seconds": 900.0, "wait_seconds": 120.0}
    return {**placed, "engine": "vllm", "vllm": {"command": program, **ON_A_CPU}}


async def sample(backend: RayBackend, **settings: Any) -> Chunk:
    params = SamplingParams(**{"max_tokens": 16, "seed": 3, **settings})
    return concat([chunk async for chunk in backend.engine(POLICY).generate(PROMPT, params)])


async def gap(backend: RayBackend, chunk: Chunk) -> float:
    """Between the learner's log-probs and the server's."""
    batch = msgspec.structs.replace(row(PROMPT, chunk), temperature_E=np.ones(len(chunk.ids), dtype=np.float32))
    return float(np.abs(await backend.learner(POLICY).forward(batch) - chunk.plain_logprobs).max())


async def learn(backend: RayBackend) -> int:
    learner = backend.learner(POLICY)
    await learner.forward_backward([row(PROMPT, await sample(backend))], LossConfig(name="reinforce"))
    await learner.optim_step(OptimParams(learning_rate=3e-3))
    return await backend.publish(POLICY)


async def without_key(replica: Replica) -> list[int]:
    """What a stranger is answered."""
    async with aiohttp.ClientSession() as session:
        paths = ("/pause", "/collective_rpc", "/v1/load_lora_adapter", "/inference/v1/generate")
        return [(await session.post(replica.api.url + path, json={})).status for path in paths]


async def checks(backend: RayBackend, cluster: Cluster) -> dict[str, Any]:
    replica = backend.sampling.fleet.replicas[0]
    assert isinstance(replica, Replica)
    first = replica.process
    assert isinstance(first, PlacedServer)
    found: dict[str, Any] = {"stranger": await without_key(replica), "gaps": [], "versions": []}

    async def look(chunk: Chunk) -> None:
        found["gaps"].append(await gap(backend, chunk))
        found["versions"].append(chunk.version)

    before = await sample(backend)
    await look(before)
    await learn(backend)
    found["moved"] = await gap(backend, before)
    await look(await sample(backend))
    call = asyncio.create_task(sample(backend, max_tokens=200))
    while not replica.running:
        await asyncio.sleep(0)
    os.kill(first.host.pid, signal.SIGKILL)
    await look(await call)
    await learn(backend)
    await look(await sample(backend))
    second = replica.process
    assert isinstance(second, PlacedServer)
    found |= {"new_process": first.host.pid != second.host.pid, "weights_left": in_memory(backend, "/[!.]*")}
    replace_node(cluster, second.host.pid)
    while replica.process is second and replica.ready.is_set():
        await asyncio.sleep(0.05)
    await look(await sample(backend))
    return found


def replace_node(cluster: Cluster, pid: int) -> None:
    """The one with this actor."""
    raylet = psutil.Process(pid).ppid()
    node = next(node for node in cluster.list_all_nodes() if raylet in pids_of(node))
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)


def in_memory(backend: RayBackend, below: str = "") -> list[str]:
    return [path.name for path in Path("/dev/shm").glob(f"{Path(backend._folder).name}*{below}")]  # pyright: ignore


async def look_at_the_backend(settings: dict[str, Any], cluster: Cluster) -> None:
    spec = ModelSpec(device="cpu", max_context=512, seed=0, **settings)
    backend = RayBackend(spec)
    await backend.start()
    try:
        found = await checks(backend, cluster)
    finally:
        await backend.close()
    sys.stdout.write(json.dumps({**found, "left": in_memory(backend)}) + "\n")
    sys.stdout.flush()


async def train(settings: dict[str, Any], run_dir: Path, steps: int) -> None:
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    learning = {**recipe.SETTINGS, "steps": steps, "val_every": steps}
    learning |= {"learning_rate": 2e-3} if settings["lora_rank"] else {}
    algorithm = agl.GRPO(backend="ray", **{**learning, **settings})
    trainer = agl.Trainer(algorithm=algorithm, n_runners=8, run_dir=run_dir, strategy="inline", console=SilentConsole())
    await trainer.fit_async(agent, recipe.train_tasks(), recipe.val_tasks())


async def main(program: str, rank: int, *training: str) -> None:
    logging.basicConfig(level=logging.INFO)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=STORE)
        chosen = options(program, str(cluster.address))
        settings: dict[str, Any] = {"model": "calc", "lora_rank": rank or None, "backend_options": chosen}
        if training:
            await train(settings, Path(training[0]), int(training[1]))
        else:
            await look_at_the_backend(settings, cluster)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:]))
