"""`python -m tests.backend.ray.verl_run RUN_DIR STEPS [SETTINGS [KILL_AFTER]]`: the calculator, learned by two of
verl's workers on a cluster of this machine alone.

SETTINGS are JSON. Once the step KILL_AFTER is done, one of the workers dies without a word (kill -9) in the middle of
what it computes next; then the cluster has three nodes, over which workers, driver and engine are spread.
"""
# ruff: noqa: ASYNC110 - waits of a test

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

import agentlightning as agl
from agentlightning.learner.verl.worker import RankWorker
from agentlightning.metrics import read_metrics
from agentlightning.trainer.example import load_example

OPTIONS = {"learner": "verl", "cpus_per_runner": 0.5, "wait_seconds": 120.0}
TITLE = f"ray::{RankWorker.__name__}"
"""What Ray calls the processes of verl's workers."""
COMPUTED = 0.3
"""Seconds of its processor's time: more than a worker takes to wait."""


def steps_in(metrics: Path) -> int:
    return max((m["step"] for m in read_metrics(metrics)), default=0) if metrics.exists() else 0


async def kill_a_worker(metrics: Path, step: int) -> None:
    while steps_in(metrics) < step:
        await asyncio.sleep(0.05)
    family = psutil.Process().children(recursive=True)
    found = [process for process in family if TITLE in " ".join(process.cmdline())]
    assert len(found) == 2, found
    process = found[-1]
    before = process.cpu_times().user
    while process.cpu_times().user < before + COMPUTED:
        await asyncio.sleep(0.01)
    process.kill()
    sys.stdout.write(f"killed process {process.pid}\n")


@contextmanager
def three_nodes() -> Iterator[str]:
    node = {"num_cpus": 2, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    for _ in range(2):
        cluster.add_node(**node)
    yield str(cluster.address)
    cluster.shutdown()


async def main(run_dir: Path, steps: int, given: dict[str, Any], kill_after: int, options: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.WARNING)
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    settings: dict[str, Any] = {**recipe.SETTINGS, "steps": steps, "schedule": "constant"}
    settings |= {"val_every": steps, "save_every": 1, "ranks": 2, **given}
    made = agl.GRPO(model="calc", backend="ray", backend_options={**OPTIONS, **options}, **settings)
    trainer = agl.Trainer(algorithm=made, n_runners=1, run_dir=run_dir)
    async with asyncio.TaskGroup() as group:
        if kill_after:
            group.create_task(kill_a_worker(run_dir / "metrics.jsonl", kill_after))
        await trainer.fit_async(agent, recipe.train_tasks(), recipe.val_tasks())


if __name__ == "__main__":
    folder, count, *more = sys.argv[1:]
    chosen = json.loads(more[0]) if more else {}
    killing = int(more[1]) if len(more) > 1 else 0
    with three_nodes() if killing else nullcontext() as address:
        spread = {"address": address, "placement": "SPREAD"} if killing else {}
        asyncio.run(main(Path(folder), int(count), chosen, killing, spread))
