"""`Engines`: a run's own engines on the cluster, model processes that only sample, and what is published to them.

`RayEngine` is the `Engine` of a policy: a request goes to one of the engines, and to another one when that is lost.
`ReplicaSampler` keeps one engine alive and at the weights that were published last: a process that ends is started
again wherever Ray finds room, and is given the current weights before it samples.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.counters import Counters, Seeds
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import Pause, ProcessSettings, Reseed, Resume
from agentlightning.backend.fleet import Fleet
from agentlightning.backend.ray.carry import Weights
from agentlightning.backend.ray.host import EngineProcess, Host
from agentlightning.backend.ray.options import RayOptions
from agentlightning.backend.ray.server import Placed, RayServer
from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.errors import AgentLightningError, BackendDied, EngineError, message_of
from agentlightning.types.arrays import Int32Array

logger = logging.getLogger(__name__)


_TRIES = 3
"""How often an engine is given the same weights, before it is replaced."""
_PAUSE_SECONDS = 0.5
"""Before the second try; twice as long before the third."""

Place = Callable[[type[Host], int], Awaitable[Placed]]
"""Starts the host of the engine with this number."""


class Engines:
    """The run's engines: started once, closed once."""

    def __init__(
        self, spec: ModelSpec, options: RayOptions, settings: ProcessSettings, weights: Weights, place: Place
    ) -> None:
        """`settings` are those of the run's model processes."""
        self._spec = spec
        self._options = options
        self._settings = settings
        self._weights = weights
        self._place = place
        self._paused = False
        self._current: dict[str, tuple[str, int]] = {}
        """By policy, the name of what was published last, and its version."""
        self._numbers = itertools.count()
        self._lock = asyncio.Lock()
        self.counters = Counters()
        self.fleet = Fleet([self.make(number) for number in range(options.first_engines)], spec.max_concurrency)
        self._seeds = Seeds(spec.seed)
        shared = RaySampling(
            fleet=self.fleet, seeds=self._seeds, concurrency_of_each=spec.max_concurrency, counters=self.counters
        )
        frozen = [spec.frozen] if spec.frozen is not None else []
        self._engines = {alias: RayEngine(alias, shared) for alias in (*spec.trained, *spec.members, *frozen)}

    async def start(self, first: Mapping[str, int]) -> None:
        """Wait until all sample. `first` are versions by policy that they do not hold when they begin."""
        for policy, version in first.items():
            await self._put(policy, version)
        await self.fleet.start()

    def make(self, number: int) -> ReplicaSampler:
        """The engine with this number, which nothing keeps alive yet."""

        async def launch() -> tuple[Placed, ModelProcess]:
            host = await self._place(EngineProcess, number)
            try:
                return host, await self._start_engine(host)
            except BaseException:  # its place is for the next one
                host.end()
                raise

        bring, leave = self._bring_all, self._weights.leave
        return ReplicaSampler(f"engine {number}", launch, bring, leave, restarts=self._options.restarts)

    async def _start_engine(self, host: Placed) -> ModelProcess:
        settings = msgspec.structs.replace(
            await self._weights.models.carried(self._settings, [host]),
            learns=False,
            ranks=1,
            tensor_parallel=1,
            sampling_threads=max(1, int(self._options.cpus_per_engine)),
        )
        process = ModelProcess(
            settings,
            start_timeout=self._options.start_seconds,
            spawn=lambda given: RayServer.spawn(given, [host]),
        )
        await process.start()
        return process

    @property
    def published_bytes(self) -> int:
        return self._weights.written_bytes

    def engine(self, policy: str) -> RayEngine:
        return self._engines[policy]

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, policy: str, version: int) -> None:
        """Sample from the learner's weights. An engine that is lost meanwhile gets them when it is back."""
        async with self._lock:
            name = await self._put(policy, version)
            ready = self.fleet.ready
            self._weights.expect(name, [sampler.host for sampler in ready if sampler.host is not None])
            taken = await asyncio.gather(*(self._brought(sampler, policy) for sampler in ready))
            if ready and not any(taken):
                logger.warning("No engine took the weights that were published; those that start again get them.")
            self._engines[policy].version = version

    async def _put(self, policy: str, version: int) -> str:
        """Their name. What was there before is let go."""
        name = f"{policy}-{next(self._numbers)}"
        await self._weights.put(policy, name)
        if policy in self._current:
            await self._weights.forget(self._current[policy][0])
        self._current[policy] = name, version
        return name

    async def _bring_all(self, sampler: ReplicaSampler) -> None:
        async with self._lock:
            for alias in self._current:
                await self._bring(sampler, alias)
            if self._paused and sampler.process is not None:
                await sampler.process.call(self._spec.trained[0], Pause())

    async def _brought(self, sampler: ReplicaSampler, policy: str) -> bool:
        """Whether it samples from them now. One that does not is replaced, and begins with them."""
        host, began = sampler.host, time.perf_counter()
        try:
            await self._bring(sampler, policy)
            sampler.publication_seconds = time.perf_counter() - began
        except BackendDied as error:
            logger.info("%s is without the weights that were published: %s", sampler.name, error)
            sampler.replace(host, str(error))
            return False
        if host is sampler.host:
            sampler.ready.set()
        return True

    async def _bring(self, sampler: ReplicaSampler, policy: str) -> None:
        """Raises BackendDied where it is gone, or does not take them, however often it is tried."""
        tried = 0
        while True:
            tried += 1
            host, process = sampler.host, sampler.process
            if host is None or process is None:
                raise BackendDied(f"{sampler.name} has just ended.")
            try:
                async with asyncio.timeout(self._options.start_seconds):
                    return await self._take_up(host, process, policy)
            except BackendDied:
                raise
            except (AgentLightningError, TimeoutError) as error:
                sampler.ready.clear()  # it may have taken a part of them
                why = message_of(error) or f"It took more than {self._options.start_seconds:g} s."
                if tried == _TRIES:
                    raise BackendDied(f"{host} did not take the weights, in {tried} tries. {why}") from error
                logger.info("%s did not take the weights; it is given them again. %s", host, why)
                await self._weights.look_again(host, self._current[policy][0])
            await asyncio.sleep(_PAUSE_SECONDS * tried)

    async def _take_up(self, host: Placed, process: ModelProcess, policy: str) -> None:
        name, version = self._current[policy]
        path = await self._weights.give_to(host, name)
        await process.policy(policy).take_up(path, version)
        await self._weights.take_from(host, name)

    # ---- the rest ----------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        self._paused = True
        await self._tell(Pause())

    async def resume(self) -> None:
        self._paused = False
        await self._tell(Resume())

    async def reseed(self, seed: int) -> None:
        self._seeds.reseed(seed)
        await self._tell(Reseed(seed), *self._spec.trained, *self._spec.members)

    async def _tell(self, verb: Pause | Resume | Reseed, *policies: str) -> None:
        """Every engine; one that is lost meanwhile begins as it should be."""
        for sampler in self.fleet.ready:
            for alias in policies or self._spec.trained[:1]:
                with suppress(BackendDied):
                    if sampler.process is not None:
                        await sampler.process.call(alias, verb)

    async def watch(self) -> NoReturn:
        """Wait until the last one has given up."""
        await self.fleet.watch()

    async def close(self) -> None:
        await self.fleet.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySampling:
    """What the engines of all policies share."""

    fleet: Fleet[ReplicaSampler]
    seeds: Seeds
    concurrency_of_each: int
    counters: Counters = field(default_factory=Counters)


class RayEngine:
    """See `Engine`. `version` is that of the weights that were published last."""

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


_Launch = Callable[[], Awaitable[tuple[Placed, ModelProcess]]]
"""Places a host and starts a model process in it."""
_Bring = Callable[["ReplicaSampler"], Awaitable[None]]
"""Gives a sampler that has just begun the current weights."""
_Leave = Callable[[Placed], Awaitable[None]]
"""Removes what only this host was still to read."""


class ReplicaSampler:
    """One engine on the cluster; `run` keeps it alive until it is cancelled, or gives up with an EngineError."""

    def __init__(self, name: str, launch: _Launch, bring: _Bring, leave: _Leave, *, restarts: int) -> None:
        self.name = name
        self.running = 0
        """Requests that it is sampling."""
        self.served = 0
        """Requests that it finished."""
        self.ready = asyncio.Event()
        self.publication_seconds = 0.0
        self.host: Placed | None = None
        self.process: ModelProcess | None = None
        self._launch = launch
        self._bring = bring
        self._leave = leave
        self._restarts = restarts
        self._replaced = ""
        """Why it is replaced, if it did not end by itself."""

    def replace(self, host: Placed | None, why: str) -> None:
        """End this host; another one is started in its place. Nothing to do where that has begun already."""
        if host is not None and host is self.host:
            self._replaced = why
            self.ready.clear()
            host.end()

    def lost(self, cause: BackendDied) -> None:
        self.ready.clear()

    async def run(self) -> None:
        """Raises EngineError when the engine cannot be started, or has died too often."""
        deaths, served = 0, 0
        while True:
            try:
                await self._live()
            except BackendDied as end:
                death = BackendDied(self._replaced) if self._replaced else end
                deaths = 1 if self.served > served else deaths + 1
                served = self.served
                if deaths > self._restarts:
                    raise EngineError(f"{death}\nIt was started {deaths} times and ended each time.") from death
                logger.warning("%s\nIt is started again.", death)
            finally:
                self.ready.clear()
                await self._end()

    async def _live(self) -> None:
        self._replaced = ""
        self.host, self.process = await self._launch()
        await self._bring(self)
        self.ready.set()
        logger.info("%s samples", self.host)
        await self.process.watch()

    async def _end(self) -> None:
        process, self.process = self.process, None
        host, self.host = self.host, None
        if process is not None:
            with suppress(AgentLightningError):
                await process.close()
        if host is not None:
            await self._leave(host)
            host.end()
