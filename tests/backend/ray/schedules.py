"""`python -m tests.backend.ray.schedules RUN_DIR STEPS SEED [second]`: a run on two nodes that a drawn schedule kills.

Two ranks, two engines and two runners on two nodes, each of which has CPUs for all of them; the driver is on a third,
without CPUs. Whether they are packed onto one node or spread over both, and the order in which each process and a node
die by kill -9, are drawn from the seed. `second`: another training, a process of its own, learns beside it on the same
cluster, and its processes are killed as well. What came of it is a line of JSON. `AGL_RAY_SCHEDULES_TASKS` tasks a step
instead of the recipe's twelve make a schedule shorter. With `AGL_RAY_SCHEDULES_VLLM`, a program to start, the engines
are vLLM's servers.
"""

# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.trainer.example import load_example

from .test_schedules import TASKS
from .three_nodes import STORE, TITLES, processes, steps_in
from .vllm_nodes import ON_A_CPU

VLLM = os.environ.get("AGL_RAY_SCHEDULES_VLLM")

CPUS = {"cpus_per_rank": 0.5, "cpus_per_engine": 0.5, "cpus_per_runner": 0.5}
NODE_CPUS = 5
"""Of each node: for all of the run, and for the second training beside it."""


def schedule(seed: int) -> tuple[str, list[str]]:
    """How processes are laid over the nodes, and what dies after each step."""
    drawn = random.Random(seed)
    deaths = ["runner", "runner", "engine", "engine", "rank", "rank", "node"]
    drawn.shuffle(deaths)
    return drawn.choice(["PACK", "SPREAD"]), deaths


def trainer(run_dir: Path, steps: int, address: str | None, seed: int, layout: str, each: int) -> agl.Trainer:
    """Of a training with so many ranks, engines and runners each; without an address an embedded one."""
    settings: dict[str, Any] = {**load_example("calc", "recipe").SETTINGS, "steps": steps, "schedule": "constant"}
    settings |= {"val_every": steps, "save_every": 1, "seed": seed, "model": "calc"}
    settings["tasks_per_step"] = TASKS
    if address is not None:
        options = {**CPUS, "address": address, "engines": each, "placement": layout, "wait_seconds": 120.0}
        if VLLM is not None:
            options |= {"engine": "vllm", "vllm": {"command": VLLM, **ON_A_CPU}, "start_seconds": 900.0}
        settings |= {"backend": "ray", "ranks": each, "backend_options": {**options, "restarts": 10}}
    return agl.Trainer(
        algorithm=agl.GRPO(**settings),
        n_runners=each if address is not None else 1,
        run_dir=run_dir,
        console=SilentConsole(),
    )


async def learn(made: agl.Trainer) -> None:
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    await made.fit_async(agent, recipe.train_tasks(), recipe.val_tasks())


async def kill_in_turn(
    deaths: list[str], killed: list[str], metrics: Path, cluster: Cluster, drawn: random.Random
) -> None:
    """Each once a step has been done since the last one; what died joins `killed`."""
    done = 0
    for what in deaths:
        while steps_in(metrics) <= done:
            await asyncio.sleep(0.05)
        await asyncio.sleep(drawn.uniform(0, 5 * TASKS / 12))
        killed.append(kill(what, cluster, drawn))
        done = steps_in(metrics)


def kill(what: str, cluster: Cluster, drawn: random.Random) -> str:
    if what == "node":
        gone = drawn.choice(list(cluster.worker_nodes))
        cluster.remove_node(gone, allow_graceful=False)
        cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE)
        return what
    found = processes("ray::VLLMServer" if VLLM is not None and what == "engine" else TITLES[what])
    if VLLM is not None and what == "engine":  # the server by itself, or the actor that has it
        found += [child for actor in found for child in actor.children(recursive=True)]
    if not found:  # it is being started again just now
        return f"no {what}"
    process = drawn.choice(found)
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return f"no {what}"
    return what


async def beside(run_dir: Path, steps: int, seed: int, address: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "tests.backend.ray.schedules", str(run_dir), str(steps), str(seed), address]
    return await asyncio.create_subprocess_exec(*command)


async def main(run_dir: Path, steps: int, seed: int, *, second: bool) -> None:
    layout, deaths = schedule(seed)
    drawn = random.Random(seed + 1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    other: asyncio.subprocess.Process | None = None
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE)
        address = str(cluster.address)
        if second:
            other = await beside(run_dir.with_name("second"), steps, seed + 1, address)
        killed: list[str] = []
        killing = asyncio.create_task(kill_in_turn(deaths, killed, run_dir / "metrics.jsonl", cluster, drawn))
        await learn(trainer(run_dir, steps, address, seed, layout, each=2))
        killing.cancel()  # where the run ended first
        ended = None if other is None else await other.wait()
        sys.stdout.write(json.dumps({"layout": layout, "killed": killed, "second": ended}) + "\n")
        sys.stdout.flush()
    finally:
        if other is not None and other.returncode is None:
            for process in [*psutil.Process(other.pid).children(recursive=True), psutil.Process(other.pid)]:
                process.kill()
        cluster.shutdown()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    folder, count, number, *more = sys.argv[1:]
    if more in ([], ["second"]):
        asyncio.run(main(Path(folder), int(count), int(number), second=bool(more)))
    else:  # the second one, or an embedded one to compare with
        there = None if more == ["embedded"] else more[0]
        asyncio.run(learn(trainer(Path(folder), int(count), there, int(number), "SPREAD", each=1)))
