"""`python -m tests.backend.ray.leaving RUN_DIR [rank]`: a machine is told to go while it is at work.

Two runners on two nodes learn with an embedded model. Once a step is done the node of one drains, and it is taken away
when its runner has left; another node has joined. `rank`: two learner ranks, an engine and a runner are on one node. It
drains when there is no other, and it is taken away when the ranks have left for one that joins two steps later. What
came of it is a line of JSON.
"""
# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

import agentlightning as agl
from agentlightning.metrics import SilentConsole
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.example import load_example

from .growing import drain
from .three_nodes import STORE, TITLES, pids_of, processes, steps_in

HALVES = {f"cpus_per_{process}": 0.5 for process in ("rank", "engine", "runner")}
STEPS = 6


def node_of(cluster: Cluster, title: str) -> Any:
    of = {pid: node for node in cluster.worker_nodes for pid in pids_of(node)}
    return next(of[process.ppid()] for process in processes(title) if process.ppid() in of)


async def until_step(metrics: Path, step: int) -> None:
    while steps_in(metrics) < step:
        await asyncio.sleep(0.05)


async def send_away(cluster: Cluster, metrics: Path, title: str, joins_after: int) -> dict[str, Any]:
    """Drain the node of a process and take it away once it has left; the steps that were done, and the checkpoints, by
    then. Another node joins so many steps later."""
    await until_step(metrics, 1)
    node = node_of(cluster, title)
    drain(node.node_id, 300)
    await until_step(metrics, steps_in(metrics) + joins_after)
    pids = pids_of(node)
    cluster.add_node(num_cpus=2, object_store_memory=STORE)
    async with asyncio.timeout(120):
        while any(process.ppid() in pids for process in processes(title)):
            await asyncio.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)
    saved = sorted(path.name for path in (metrics.parent / "checkpoints").glob("*"))
    return {"gone_after": steps_in(metrics), "saved": saved}


async def attempts_of(store: Path) -> dict[str, int]:
    """How many rollouts took so many attempts."""
    opened = SqliteLightningStore(store)
    try:
        rollouts = await opened.query_rollouts(limit=-1)
        latest = [await opened.get_latest_attempt(rollout.rollout_id) for rollout in rollouts]
    finally:
        await opened.close()
    return dict(Counter(str(attempt.sequence_id) for attempt in latest if attempt is not None))


async def main(run_dir: Path, title: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    of_ranks = title == TITLES["rank"]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    try:
        for _ in range(1 if of_ranks else 2):
            cluster.add_node(num_cpus=2 if of_ranks else 1, object_store_memory=STORE)
        os.environ["RAY_ADDRESS"] = str(cluster.address)
        recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
        settings: dict[str, Any] = {**recipe.SETTINGS, "steps": STEPS, "val_every": 0, "save_every": 100}
        if of_ranks:
            settings |= {"backend": "ray", "ranks": 2, "backend_options": {**HALVES, "wait_seconds": 120.0}}
        trainer = agl.Trainer(
            algorithm=agl.GRPO(model="calc", **settings),
            strategy="ray",
            n_runners=1 if of_ranks else 2,
            run_dir=run_dir,
            console=SilentConsole(),
        )
        going = asyncio.create_task(send_away(cluster, run_dir / "metrics.jsonl", title, 2 if of_ranks else 0))
        await trainer.fit_async(agent, recipe.train_tasks())
        found = {**await going, "attempts": await attempts_of(run_dir / "store.db")}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), TITLES[(sys.argv[2:] or ["runner"])[0]]))
