"""`python -m tests.backend.ray.leaving RUN_DIR`: a machine with a runner is told to go while the runner is at work.

Two runners on two nodes learn with an embedded model. Once a step is done the node of one drains, and it is taken away
when its runner has left; another node has joined. What came of it is a line of JSON.
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
from .three_nodes import STORE, pids_of, processes, steps_in

RUNNER = "ray::RunnerActor"


def node_with_a_runner(cluster: Cluster) -> Any:
    of = {pid: node for node in cluster.worker_nodes for pid in pids_of(node)}
    return next(of[runner.ppid()] for runner in processes(RUNNER) if runner.ppid() in of)


async def send_away(cluster: Cluster, metrics: Path) -> int:
    """Drain a node and take it away; how many runners were on it when it was taken."""
    while steps_in(metrics) < 1:
        await asyncio.sleep(0.05)
    node = node_with_a_runner(cluster)
    cluster.add_node(num_cpus=1, object_store_memory=STORE)
    drain(node.node_id, 300)

    def left() -> int:
        pids = pids_of(node)
        return sum(runner.ppid() in pids for runner in processes(RUNNER))

    async with asyncio.timeout(120):
        while left():
            await asyncio.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)
    return steps_in(metrics)


async def attempts_of(store: Path) -> dict[str, int]:
    """How many rollouts took so many attempts."""
    opened = SqliteLightningStore(store)
    try:
        rollouts = await opened.query_rollouts(limit=-1)
        latest = [await opened.get_latest_attempt(rollout.rollout_id) for rollout in rollouts]
    finally:
        await opened.close()
    return dict(Counter(str(attempt.sequence_id) for attempt in latest if attempt is not None))


async def main(run_dir: Path) -> None:
    logging.basicConfig(level=logging.WARNING)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=STORE)
        os.environ["RAY_ADDRESS"] = str(cluster.address)
        recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
        settings: dict[str, Any] = {**recipe.SETTINGS, "steps": 6, "val_every": 0}
        trainer = agl.Trainer(
            algorithm=agl.GRPO(model="calc", **settings),
            strategy="ray",
            n_runners=2,
            run_dir=run_dir,
            console=SilentConsole(),
        )
        going = asyncio.create_task(send_away(cluster, run_dir / "metrics.jsonl"))
        await trainer.fit_async(agent, recipe.train_tasks())
        found = {"gone_after": await going, "attempts": await attempts_of(run_dir / "store.db")}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
