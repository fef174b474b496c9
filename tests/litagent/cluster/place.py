"""A namespace of a cluster, a runner that makes Jobs in it, and a store that tells how they ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from agentlightning.litagent import Kubernetes, Program
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import LLM, AttemptedRollout, RolloutConfig
from agentlightning.types.reward import find_final_reward
from tests.litagent.cluster.admin import Admin

KEY = "agl-key-of-the-attempt"
RESOURCES: Any = {"llm": LLM(endpoint=f"http://gateway:9/key/{KEY}/v1", model="m", api_key=KEY)}


@dataclass
class Place:
    """The cluster is at `url`."""

    url: str
    namespace: str
    admin: Admin
    store: InMemoryLightningStore

    def isolation(self, image: str = "agent:1", start_seconds: float = 20.0, **settings: Any) -> Kubernetes:
        return Kubernetes(image, server=self.url, namespace=self.namespace, start_seconds=start_seconds, **settings)

    def program(self, command: Any, image: str = "agent:1", start_seconds: float = 20.0, **options: Any) -> Program:
        return Program(command, isolation=self.isolation(image, start_seconds), **options)

    async def run(self, agent: Program, task: Any = None, seconds: float = 30.0) -> AttemptedRollout:
        """One attempt, which has so long."""
        runner = LitAgentRunner(DummyTracer())
        runner.init(agent)
        runner.init_worker(0, self.store)
        config = RolloutConfig(timeout_seconds=seconds, max_attempts=1)
        asked = await self.store.start_rollout(task, config=config, resources_id=await self._resources_id())
        try:
            async with asyncio.timeout(seconds + 30):
                await runner._execute(asked)
        finally:
            runner.teardown()
        return await self.rollout(asked.rollout_id)

    async def rollout(self, rollout_id: str) -> AttemptedRollout:
        found = await self.store.get_rollout_by_id(rollout_id)
        assert isinstance(found, AttemptedRollout)
        return found

    async def _resources_id(self) -> str:
        update = await self.store.get_latest_resources()
        assert update is not None
        return update.resources_id

    async def reward(self, rollout: AttemptedRollout) -> float | None:
        return find_final_reward((await self.store.query_spans(rollout.rollout_id)).items)

    async def attributes(self, rollout: AttemptedRollout) -> Any:
        return (await self.store.query_spans(rollout.rollout_id)).items[0].attributes

    async def until_empty(self, seconds: float = 30) -> None:
        async with asyncio.timeout(seconds):
            while any([await self.admin.all(kind) for kind in ("jobs", "pods", "secrets")]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def until_running(self) -> str:
        """The name of a pod that runs."""
        async with asyncio.timeout(10):
            while True:
                for pod in await self.admin.all("pods"):
                    if pod["status"]["phase"] == "Running":
                        return pod["metadata"]["name"]
                await asyncio.sleep(0.02)
