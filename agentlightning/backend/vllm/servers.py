"""`Servers`: the vLLM servers of a run, what is published to them, and the engines of its policies on them.

Where the servers are and how weights get there is the backend's: it gives the replicas and an `WeightExchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import msgspec

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.counters import Counters, Seeds
from agentlightning.backend.fleet import Fleet
from agentlightning.backend.vllm.engine import VLLMEngine, VLLMSampling
from agentlightning.backend.vllm.process import ServerContent
from agentlightning.backend.vllm.publication import AdapterPublication, Gate, WeightExchange, WeightsPublication
from agentlightning.backend.vllm.replica import Bring, Replica
from agentlightning.engine.base import EngineInfo


class Servers:
    """Started once, closed once."""

    def __init__(
        self,
        spec: ModelSpec,
        served: ServerContent,
        info: EngineInfo,
        exchange: WeightExchange,
        replicas: Callable[[Bring], Sequence[Replica]],
    ) -> None:
        """`info` is what the learner says of the model."""
        self.gate = Gate()
        self.counters = Counters()
        self._seeds = Seeds(spec.seed)
        self._paused = False
        self._exchange = exchange
        self._publication = (
            AdapterPublication(exchange)
            if served.lora_rank is not None
            else WeightsPublication(exchange, self.gate, info.version)
        )
        self.bring = self._publication.bring
        self.fleet = Fleet(replicas(self.bring), served.max_concurrency)
        many = served.max_concurrency * len(self.fleet.replicas)
        shared = VLLMSampling(
            fleet=self.fleet,
            gate=self.gate,
            publication=self._publication,
            in_flight=spec.in_flight,
            info=msgspec.structs.replace(info, max_context=served.max_context, max_concurrency=many),
            seeds=self._seeds,
            counters=self.counters,
        )
        frozen = [spec.frozen] if spec.frozen is not None else []
        self._engines = {alias: VLLMEngine(alias, shared) for alias in (*spec.trained, *spec.members, *frozen)}

    async def start(self, first: Mapping[str, int]) -> None:
        """Wait until all sample. `first` are versions by policy that they do not hold when they begin."""
        for policy, version in first.items():
            await self._publication.publish(policy, version, [])
        await self.fleet.start()

    @property
    def published_bytes(self) -> int:
        return self._exchange.published_bytes

    def engine(self, policy: str) -> VLLMEngine:
        return self._engines[policy]

    async def publish(self, policy: str, version: int) -> None:
        """Sample from the learner's weights. A failure leaves the servers that did not take them unused."""
        await self._publication.publish(policy, version, self.fleet.ready)
        self._engines[policy].version = version

    async def pause(self) -> None:
        if not self._paused:
            self._paused = True
            await self.gate.close()

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            await self.gate.open()

    async def reseed(self, seed: int) -> None:
        self._seeds.reseed(seed)
        for replica in self.fleet.ready:
            await replica.api.forget_contexts()

    async def watch(self) -> NoReturn:
        """Wait until the last one has given up."""
        await self.fleet.watch()

    async def close(self) -> None:
        await self.fleet.close()
