"""The Ray backend: engines and the ranks of one learner on the machines of a cluster, and the weights between them.

    rank 0 ── gloo or NCCL ── ranks 1 …       one learner (`embedded.ranks`)
      │
      └ files through Ray's object store ─→ engines (model processes that only sample), checkpoints (this machine)

Ray places processes, says when one ended, and carries files; what is computed is told over sockets.
"""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from agentlightning.backend.base import BackendStats, ModelSpec
from agentlightning.backend.embedded.backend import EmbeddedBackend, settings_of
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.download import fetch
from agentlightning.backend.embedded.protocol import Pause, Reseed, Resume
from agentlightning.backend.fleet import Fleet, first_end
from agentlightning.backend.ray.carry import carried
from agentlightning.backend.ray.cluster import LOOPBACK, Cluster, Placement, connected, reserve
from agentlightning.backend.ray.engine import RayEngine, Sampling
from agentlightning.backend.ray.folder import base_of, pack, set_base, unpack
from agentlightning.backend.ray.host import EngineProcess, Host, LearnerRank
from agentlightning.backend.ray.on_verl import driver_settings, refuse_for_verl
from agentlightning.backend.ray.options import parse_options
from agentlightning.backend.ray.room import Need
from agentlightning.backend.ray.sampler import Sampler
from agentlightning.backend.ray.server import Placed, RayServer, arrived
from agentlightning.backend.seeds import Seeds
from agentlightning.engine.limits import MIN_CONTEXT
from agentlightning.errors import AgentLightningError, BackendDied

logger = logging.getLogger(__name__)


class RayBackend(EmbeddedBackend):
    """See `Backend`. The learner is a model process that samples nothing, over all ranks; each engine is one that does
    not learn."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = parse_options(spec.backend_options)
        self._settings = settings_of(spec)
        if self._options.on_verl:
            refuse_for_verl(spec, self._options)
        self._folder = str(Path(tempfile.gettempdir()) / f"agl-ray-{secrets.token_hex(4)}")
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()
        self._engines: dict[str, RayEngine] = {}
        self._paused = False
        self._gpus_per_rank = 0.0
        self._at: str | None = None
        """Where hosts listen; None: each at its machine's address."""
        self._published: dict[str, tuple[Any, int]] = {}
        """By policy, its packed weights in the object store, and their version."""
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        for name in {self._settings.model, self._settings.learner.reference or self._settings.model}:
            await fetch(name)
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(
                connected(self._options, cpus=self._options.cpus(self._spec.ranks))
            )
            placement = await reserve(self._needs(cluster), self._options, self._options.placement)
            stack.push_async_callback(placement.give_back)
            self._at = LOOPBACK if cluster.host == LOOPBACK else None
            await self._start_learner(stack, placement)
            await self._start_sampling(stack, placement)
            self._stack = stack.pop_all()

    def _needs(self, cluster: Cluster) -> list[Need]:
        options = self._options
        wanted = 1.0 if cluster.has_gpus and self._spec.device != "cpu" else 0.0
        of_rank = wanted if options.gpus_per_rank is None else options.gpus_per_rank
        of_engine = of_rank if options.gpus_per_engine is None else options.gpus_per_engine
        self._gpus_per_rank = of_rank
        return [
            Need("learner rank", self._spec.ranks, {"CPU": options.cpus_per_rank, "GPU": of_rank}),
            *([Need("learner", 1, {"CPU": options.cpus_per_rank})] if options.on_verl else []),
            Need("engine", options.engines, {"CPU": options.cpus_per_engine, "GPU": of_engine}),
        ]

    async def _start_learner(self, stack: AsyncExitStack, placement: Placement) -> None:
        """All ranks, with the first one's process as what the verbs go to; or the process that drives verl's ranks."""
        on_verl, ranks = self._options.on_verl, self._spec.ranks
        names = {ranks: "learner"} if on_verl else {rank: f"learner rank {rank}" for rank in range(ranks)}
        self._hosts = await asyncio.gather(
            *(self._host(LearnerRank, placement, bundle, name) for bundle, name in names.items())
        )
        stack.push_async_callback(self._clean_up, self._hosts)
        settings = msgspec.structs.replace(
            await carried(self._settings, self._hosts, self._folder),
            max_context=MIN_CONTEXT,
            max_concurrency=1,
            learning_threads=max(1, int(self._options.cpus_per_rank)) * len(self._hosts),
        )
        if on_verl:
            settings = driver_settings(settings, self._options, self._gpus_per_rank)
        self.process = ModelProcess(
            settings,
            start_timeout=self._options.start_seconds,
            spawn=lambda given: RayServer.spawn(given, self._hosts),
        )
        stack.push_async_callback(self.process.close)
        await self.process.start()

    async def _host(self, kind: type[Host], placement: Placement, bundle: int, name: str) -> Placed:
        level = logging.getLogger().getEffectiveLevel()
        actor = placement.place(kind, bundle, name, level, self._folder)
        return await arrived(name, actor, self._options.start_seconds, self._at)

    async def _clean_up(self, hosts: Sequence[Placed]) -> None:
        """Leave nothing on the machines; those that are gone have nothing to clean."""
        await self._remove_files(hosts)
        for host in hosts:
            host.end()

    async def _remove_files(self, hosts: Iterable[Placed]) -> None:
        for host in hosts:
            with suppress(AgentLightningError):
                await host.ask("remove")

    async def _start_sampling(self, stack: AsyncExitStack, placement: Placement) -> None:
        """Engines with the learner's weights."""
        spec, options = self._spec, self._options
        samplers = [self._sampler(placement, number) for number in range(options.engines)]
        fleet = Fleet(samplers)
        many = spec.max_concurrency * options.engines
        self._shared = shared = Sampling(fleet=fleet, seeds=Seeds(spec.seed), max_concurrency=many)
        frozen = [spec.frozen] if spec.frozen is not None else []
        self._engines = {alias: RayEngine(alias, shared) for alias in (*spec.trained, *spec.members, *frozen)}
        if self._settings.lora is not None or spec.adapters:  # a new adapter is drawn once, by the learner
            for alias in spec.trained:
                await self._pack_weights(alias, (await self.learner(alias).info()).version)
        stack.push_async_callback(fleet.close)
        await fleet.start()

        async def remove_files() -> None:
            engines = [sampler.host for sampler in samplers if sampler.host is not None]
            await self._remove_files([*self._hosts, *engines])

        stack.push_async_callback(remove_files)  # first of all, while there is who can

    def _sampler(self, placement: Placement, number: int) -> Sampler:
        name = f"engine {number}"

        async def launch() -> tuple[Placed, ModelProcess]:
            first = self._spec.ranks + self._options.on_verl
            host = await self._host(EngineProcess, placement, first + number, name)
            try:
                return host, await self._start_engine(host)
            except BaseException:  # its place is for the next one
                host.end()
                raise

        async def bring(sampler: Sampler) -> None:
            async with self._lock:
                for alias in self._published:
                    await self._bring(sampler, alias)
                if self._paused and sampler.process is not None:
                    await sampler.process.call(self._spec.trained[0], Pause())

        return Sampler(name, launch, bring, restarts=self._options.restarts)

    async def _start_engine(self, host: Placed) -> ModelProcess:
        settings = msgspec.structs.replace(
            await carried(self._settings, [host], self._folder),
            learns=False,
            ranks=1,
            sampling_threads=max(1, int(self._options.cpus_per_engine)),
        )
        process = ModelProcess(
            settings,
            start_timeout=self._options.start_seconds,
            spawn=lambda given: RayServer.spawn(given, [host]),
        )
        await process.start()
        return process

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, policy: str) -> int:
        """See `Backend.publish`. An engine that is lost meanwhile gets the weights when it is back."""
        version = await self.learner(policy).publish()
        if version != self._engines[policy].version:
            await self._publish(policy, version)
        return version

    async def take_up(self, policy: str, uri: str) -> None:
        name = f"{policy}-{next(self._numbers)}"
        await self._spread(uri, name, self._hosts[:1])
        await self.learner(policy).take_up(self._there(name))
        await self._publish(policy, (await self.learner(policy).info()).version)

    async def _publish(self, policy: str, version: int) -> None:
        async with self._lock:
            await self._pack_weights(policy, version)
            ready = self._shared.fleet.ready
            lost = await asyncio.gather(*(self._brought(sampler, policy) for sampler in ready))
            if ready and all(lost):
                logger.warning("No engine took the weights that were published; those that start again get them.")
            self._engines[policy].version = version

    async def _pack_weights(self, policy: str, version: int) -> None:
        """Into the object store, from where every engine takes them; what was there before is let go."""
        name = f"{policy}-{next(self._numbers)}"
        await self.learner(policy).export(self._there(name))
        self._published[policy] = self._hosts[0].actor.pack.remote(name), version

    async def _brought(self, sampler: Sampler, policy: str) -> bool:
        """Whether it was lost on the way."""
        try:
            await self._bring(sampler, policy)
        except BackendDied:
            sampler.ready.clear()
            return True
        return False

    async def _bring(self, sampler: Sampler, policy: str) -> None:
        if sampler.host is None or sampler.process is None:
            raise BackendDied(f"{sampler.name} has just ended.")
        packed, version = self._published[policy]
        name = f"{policy}-{next(self._numbers)}"
        await sampler.host.ask("unpack", packed, name)
        await sampler.process.policy(policy).take_up(self._there(name), version)
        await sampler.host.ask("remove", name)

    async def checkpoint(self, uri: str) -> None:
        base = self._settings.model if self._spec.adapters else base_of(Path(self._settings.model))
        for alias, model, optimizer in self._places(uri):
            await self._fetch(self.learner(alias).export, model, base or self._settings.model)
            await self._fetch(self.learner(alias).save_state, optimizer, None)

    async def _fetch(self, write: Any, path: str, base: str | None) -> None:
        """Have the learner write a folder, and bring it here; an adapter in it stands on `base`."""
        name = f"checkpoint-{next(self._numbers)}"
        await write(self._there(name))
        packed = await self._hosts[0].ask("pack", name)
        await asyncio.to_thread(unpack, packed, Path(path))
        if base is not None:
            set_base(Path(path), base)

    async def restore(self, uri: str) -> None:
        for alias, _, optimizer in self._places(uri):
            name = f"checkpoint-{next(self._numbers)}"
            await self._spread(optimizer, name, self._hosts)
            await self.learner(alias).load_state(self._there(name))
            await self.publish(alias)

    async def _spread(self, path: str, name: str, hosts: Sequence[Placed]) -> None:
        """Bring a folder of this machine to those of the hosts."""
        import ray  # pyright: ignore[reportMissingImports]

        packed = ray.put(await asyncio.to_thread(pack, Path(path)))
        machines = {host.address.host: host for host in hosts}
        await asyncio.gather(*(host.ask("unpack", packed, name) for host in machines.values()))

    def _there(self, name: str) -> str:
        return str(Path(self._folder) / name)

    # ---- the rest of the seam ----------------------------------------------------------------------------------------

    def engine(self, policy: str) -> RayEngine:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._engines[policy]

    async def pause(self) -> None:
        self._paused = True
        await self._tell(Pause())

    async def resume(self) -> None:
        self._paused = False
        await self._tell(Resume())

    async def reseed(self, seed: int) -> None:
        self._shared.seeds.reseed(seed)
        await self._tell(Reseed(seed), *self._spec.trained, *self._spec.members)

    async def _tell(self, verb: Pause | Resume | Reseed, *policies: str) -> None:
        """Every engine; one that is lost meanwhile begins as it should be."""
        for sampler in self._shared.fleet.ready:
            for alias in policies or self._spec.trained[:1]:
                with suppress(BackendDied):
                    if sampler.process is not None:
                        await sampler.process.call(alias, verb)

    async def watch(self) -> NoReturn:
        """Wait until a rank of the learner or the last engine ends by itself."""
        await first_end(self.process.watch(), self._shared.fleet.watch())

    async def stats(self) -> BackendStats:
        learner = await self.process.stats()
        return self._shared.counters.as_stats(learning_s=learner.learning_s, idle_s=learner.idle_s)

    async def close(self) -> None:
        await self._stack.aclose()
