"""`python -m tests.backend.ray.three_nodes RUN_DIR STEPS [WHAT@STEP …]`: a run on a local cluster of three nodes.

Two learner ranks and an engine apart from each other, two runners. WHAT dies without a word (kill -9) once STEP is
done: "runner", "rank", "engine", or the "node" with a rank of the learner; for "node+" another one joins. A death waits
until a step has been done since the last one.
"""
# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.trainer.example import load_example

STORE = 100 << 20
TITLES = {"runner": "ray::RunnerActor", "rank": "ray::LearnerRank", "engine": "ray::EngineProcess"}
"""What Ray calls the processes."""
OPTIONS = {"placement": "SPREAD", "cpus_per_runner": 0.5, "wait_seconds": 120.0}


def algorithm(steps: int, address: str) -> agl.GRPO:
    settings: dict[str, Any] = {**load_example("calc", "recipe").SETTINGS, "steps": steps, "schedule": "constant"}
    settings |= {"val_every": steps, "save_every": 1, "ranks": 2}
    return agl.GRPO(model="calc", backend="ray", backend_options={**OPTIONS, "address": address}, **settings)


async def kill_all(wanted: list[str], metrics: Path, cluster: Cluster) -> None:
    done = 0
    for what, step in (text.split("@") for text in wanted):
        before = done
        while (done := steps_in(metrics)) < max(int(step), before + 1):
            await asyncio.sleep(0.05)
        kill(what, cluster)
        done = steps_in(metrics)


def steps_in(metrics: Path) -> int:
    return max((m["step"] for m in read_metrics(metrics)), default=0) if metrics.exists() else 0


def kill(what: str, cluster: Cluster) -> None:
    if what not in ("node", "node+"):
        os.kill(processes(TITLES[what])[-1].pid, signal.SIGKILL)
        return
    away = {pid: node for node in cluster.worker_nodes for pid in pids_of(node)}  # not the head, which all stands on
    rank = next(rank for rank in processes(TITLES["rank"]) if rank.ppid() in away)
    cluster.remove_node(away[rank.ppid()], allow_graceful=False)
    if what == "node+":
        cluster.add_node(num_cpus=2, object_store_memory=STORE)


def pids_of(node: Any) -> set[int]:
    return {info.process.pid for kind in node.all_processes.values() for info in kind}


def processes(title: str) -> list[psutil.Process]:
    """Of the actors that Ray shows under this title, those that began first before others."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended meanwhile
            if title in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=lambda p: p.create_time())


async def main(run_dir: Path, steps: int, wanted: list[str]) -> None:
    logging.basicConfig(level=logging.WARNING)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": STORE})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, object_store_memory=STORE)
        recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
        made = algorithm(steps, str(cluster.address))
        trainer = agl.Trainer(algorithm=made, n_runners=2, run_dir=run_dir, console=SilentConsole())
        killing = asyncio.create_task(kill_all(wanted, run_dir / "metrics.jsonl", cluster))
        result = await trainer.fit_async(agent, recipe.train_tasks(), recipe.val_tasks())
        await killing
        sys.stdout.write(json.dumps({"checkpoint": str(result.checkpoint)}) + "\n")
        sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    folder, count, *deaths = sys.argv[1:]
    asyncio.run(main(Path(folder), int(count), deaths))
