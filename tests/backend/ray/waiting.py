"""`python -m tests.backend.ray.waiting`: room that is lacking, is there, and lacks again as a node dies."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

from agentlightning.backend.ray.cluster import Need, connected, reserve
from agentlightning.backend.ray.options import RayOptions

from .three_nodes import STORE


class Words(logging.Handler):
    """Keeps what is said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    async def until(self, words: str) -> None:
        async with asyncio.timeout(90):
            while not any(words in said for said in self.said):  # noqa: ASYNC110 - a wait of a test
                await asyncio.sleep(0.1)


async def main() -> None:
    words = Words()
    logging.getLogger("agentlightning").addHandler(words)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": STORE})

    def join() -> Any:
        return cluster.add_node(num_cpus=2, object_store_memory=STORE)

    try:
        options = RayOptions(address=str(cluster.address), wait_seconds=120.0)
        async with connected(options, cpus=3):
            asking = asyncio.create_task(reserve([Need("runner", 3, {"CPU": 1})], options, "PACK"))
            await words.until("needs 3 CPUs, 1 available, since")
            node = join()
            placement = await asking
            first = len(words.said)
            async with placement.watched():
                cluster.remove_node(node, allow_graceful=False)
                await words.until("needs 2 CPUs, 0 available, since")
            sys.stdout.write(json.dumps({"first": words.said[:first], "then": words.said[first:]}) + "\n")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
