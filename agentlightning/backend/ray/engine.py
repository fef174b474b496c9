"""A policy's `Engine`: requests go to one of the engines on the cluster, and to another one when it is lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from agentlightning.backend.counters import Counters
from agentlightning.backend.fleet import Fleet
from agentlightning.backend.ray.sampler import ReplicaSampler
from agentlightning.backend.seeds import Seeds
from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.errors import BackendDied
from agentlightning.types.arrays import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySampling:
    """What the engines of all policies share."""

    fleet: Fleet[ReplicaSampler]
    seeds: Seeds
    concurrency_of_each: int
    counters: Counters = field(default_factory=Counters)


class RayEngine:
    """See `Engine`. `version` is that of what was published last."""

    def __init__(self, policy: str, shared: RaySampling, version: int = 0) -> None:
        self._policy = policy
        self._shared = shared
        self.version = version

    async def info(self) -> EngineInfo:
        sampler = await self._shared.fleet.pick("")
        assert sampler.process is not None
        info = await sampler.process.policy(self._policy).info()
        at_once = self._shared.concurrency_of_each * len(self._shared.fleet.replicas)
        return msgspec.structs.replace(info, version=self.version, max_concurrency=at_once)

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`, and `Fleet.sample` for an engine that is lost."""
        shared = self._shared
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=shared.seeds.next())
        async with aclosing(
            shared.fleet.sample(prompt_ids, params, lambda one: self._sample(one, prompt_ids, params, stream))
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _sample(
        self, sampler: ReplicaSampler, prompt_ids: Int32Array, params: SamplingParams, stream: bool
    ) -> AsyncGenerator[Chunk, None]:
        """One try on one engine."""
        if sampler.process is None:
            raise BackendDied(f"{sampler.name} has just ended.")
        counters, cached = self._shared.counters, 0
        sampler.running += 1
        counters.begin()
        try:
            handle = sampler.process.policy(self._policy)
            async with aclosing(handle.generate(prompt_ids, params, stream=stream)) as chunks:
                async for chunk in chunks:
                    counters.sampled += len(chunk.ids)
                    cached = max(cached, chunk.cached_tokens)
                    yield chunk
            sampler.served += 1
            counters.cached += cached
            counters.prefilled += len(prompt_ids) - cached
        finally:
            sampler.running -= 1
            counters.end()
