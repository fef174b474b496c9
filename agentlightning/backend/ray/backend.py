"""The Ray backend: engines and the ranks of one learner on the machines of a cluster, and the weights between them.

    rank 0 ── gloo or NCCL ── ranks 1 …       one learner (`embedded.ranks`)
      │
      └ files through Ray's object store ─→ engines (`Engines`: ours; or vLLM's servers), checkpoints (this machine)

Ray places processes, reports when one has ended, and carries files; what they compute goes over sockets. The ranks may
also be verl's workers: what those cannot do is refused here, and the process that drives them is a model process on the
cluster like any other, which computes on the CPU and does not count as a rank.
"""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from agentlightning.backend.base import BackendStats, Drain, ModelSpec
from agentlightning.backend.embedded.backend import EmbeddedBackend, settings_of
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.download import fetch
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.backend.fleet import first_end
from agentlightning.backend.ray.carry import (
    CarriedModels,
    Weights,
    base_of,
    is_folder,
    one_per_machine,
    pack,
    set_base,
    unpack,
)
from agentlightning.backend.ray.cluster import (
    LOOPBACK,
    Cluster,
    Need,
    Placement,
    connected,
    of_run,
    on_other_machines,
    reserve,
)
from agentlightning.backend.ray.elastic import Elastic, LearnerPlaces
from agentlightning.backend.ray.engines import Engines, RayEngine
from agentlightning.backend.ray.host import Host, LearnerRank, Porter
from agentlightning.backend.ray.on_vllm import vllm_servers
from agentlightning.backend.ray.options import RayOptions, parse_options
from agentlightning.backend.ray.server import Placed, RayServer, arrived
from agentlightning.backend.vllm.backend import served_by
from agentlightning.backend.vllm.engine import VLLMEngine
from agentlightning.backend.vllm.servers import Servers
from agentlightning.engine.base import EngineInfo
from agentlightning.engine.limits import MIN_CONTEXT
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.learner.verl.sizes import Sizes


class RayBackend(EmbeddedBackend):
    """See `Backend`. The learner is a model process that samples nothing, over all ranks; each engine is one that does
    not learn, or a vLLM server."""

    sampling: Engines | Servers

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = parse_options(spec.backend_options)
        self._settings = settings_of(spec)
        self._run = Path(spec.folder).name if spec.folder else None
        if self._options.on_verl:
            _refuse_for_verl(spec, self._options)
        self._folder = str(Path(tempfile.gettempdir()) / f"agl-ray-{secrets.token_hex(8)}")
        self._models = CarriedModels(self._folder)
        self._numbers = itertools.count()
        self._stack = AsyncExitStack()
        self._gpus_per_rank = self._gpus_per_engine = 0.0
        self._at: str | None = None
        """Where hosts listen; None: each at its machine's address."""
        self._hosts: dict[str, Placed] = {}
        """By name, the last that was placed."""
        self._learner_places: LearnerPlaces | None = None

    async def start(self) -> None:
        for name in {self._settings.model, self._settings.learner.reference or self._settings.model}:
            await fetch(name)
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(
                connected(self._options, cpus=self._options.cpus(self._spec.ranks))
            )
            needs = self._needs(cluster)
            placement = await reserve(needs, self._options, self._options.placement, self._run)
            stack.push_async_callback(placement.give_back)
            await stack.enter_async_context(placement.watched())
            self._at = LOOPBACK if cluster.host == LOOPBACK else None
            info = await self._start_learner(stack, placement)
            self._learner_places = LearnerPlaces(placement, self._learner_names, needs)
            await self._start_sampling(stack, placement, self._learner_places, info)
            self._stack = stack.pop_all()

    def _needs(self, cluster: Cluster) -> list[Need]:
        options = self._options
        wanted = 1.0 if cluster.has_gpus and self._spec.device != "cpu" else 0.0
        of_rank = wanted if options.gpus_per_rank is None else options.gpus_per_rank
        by_itself = wanted * options.vllm.tensor_parallel_size if options.engine == "vllm" else of_rank
        of_engine = by_itself if options.gpus_per_engine is None else options.gpus_per_engine
        self._gpus_per_rank, self._gpus_per_engine = of_rank, of_engine
        return [
            Need("learner rank", self._spec.ranks, {"CPU": options.cpus_per_rank, "GPU": of_rank}),
            *([Need("learner", 1, {"CPU": options.cpus_per_rank})] if options.on_verl else []),
            self._engine_need(options.first_engines),
        ]

    @property
    def _learner_names(self) -> list[str]:
        """Of the first bundles: the ranks; of verl's, the process that drives them, too."""
        ranks = [f"learner rank {rank}" for rank in range(self._spec.ranks)]
        return [*ranks, "learner"] if self._options.on_verl else ranks

    def _engine_need(self, count: int) -> Need:
        return Need("engine", count, {"CPU": self._options.cpus_per_engine, "GPU": self._gpus_per_engine})

    async def _start_learner(self, stack: AsyncExitStack, placement: Placement) -> EngineInfo:
        """All ranks, with the first one's process as what the verbs go to; or the process that drives verl's ranks."""
        on_verl, ranks = self._options.on_verl, self._spec.ranks
        named = dict(enumerate(self._learner_names))
        names = {ranks: named[ranks]} if on_verl else named
        self._learners = await asyncio.gather(
            *(self._host(LearnerRank, placement, bundle, name) for bundle, name in names.items())
        )
        stack.push_async_callback(self._clean_up, self._learners)
        porters = await self._porters(stack, placement) if on_verl else []
        settings = msgspec.structs.replace(
            await self._models.carried(self._settings, self._learners, porters=porters),
            max_context=MIN_CONTEXT,
            max_concurrency=1,
            learning_threads=max(1, int(self._options.cpus_per_rank)) * len(self._learners),
        )
        if on_verl:
            settings = driver_settings(settings, self._options, self._gpus_per_rank)
        self.process = ModelProcess(
            settings,
            start_timeout=self._options.start_seconds,
            spawn=lambda given: RayServer.spawn(given, self._learners),
        )
        stack.push_async_callback(self.process.close)
        return await self.process.start()

    async def _porters(self, stack: AsyncExitStack, placement: Placement) -> list[Placed]:
        """Who takes the model in a folder, on each machine where verl's workers will be and their driver is not."""
        if not is_folder(self._settings.model):
            return []
        ranks = self._spec.ranks
        bundles = on_other_machines(ranks, range(ranks), await placement.machines())
        hosts = await asyncio.gather(
            *(self._host(Porter, placement, bundle, f"files of worker {bundle}", unreserved=True) for bundle in bundles)
        )
        stack.push_async_callback(self._clean_up, hosts)
        return hosts

    async def _host(
        self, kind: type[Host], placement: Placement, bundle: int, name: str, *, unreserved: bool = False
    ) -> Placed:
        level = logging.getLogger().getEffectiveLevel()
        named = of_run(name, self._run)
        actor = placement.place(kind, bundle, named, level, self._folder, unreserved=unreserved)
        self._hosts[name] = host = await arrived(name, actor, self._options.start_seconds, self._at)
        return host

    async def _clean_up(self, hosts: Sequence[Placed]) -> None:
        """Leave nothing on the machines; those that are gone have nothing to clean."""
        await self._remove_files(hosts)
        for host in hosts:
            host.end()

    async def _remove_files(self, hosts: Iterable[Placed]) -> None:
        for host in hosts:
            with suppress(AgentLightningError):
                await host.ask("remove")

    async def _start_sampling(
        self, stack: AsyncExitStack, placement: Placement, learner: LearnerPlaces, info: EngineInfo
    ) -> None:
        """Engines with the learner's weights."""
        spec, options = self._spec, self._options
        weights = Weights(self._export, self._learners[0], self._models)
        first = spec.ranks + options.on_verl

        async def place(kind: type[Host], number: int) -> Placed:
            name = f"engine {number}"
            added = elastic.places.get(name)
            at = (placement, first + number) if added is None else (added, 0)
            return await self._host(kind, *at, name)

        served = replace(served_by(spec, options.first_engines), on_cpu=not self._gpus_per_engine)
        if options.engine == "vllm":
            self.sampling, make = vllm_servers(spec, options, served, info, weights, place)
        else:
            self.sampling = Engines(spec, options, self._settings, weights, place)
            make = self.sampling.make
        there = {replica.name: first + number for number, replica in enumerate(self.sampling.fleet.replicas)}
        elastic = Elastic[Any](
            self.sampling.fleet,
            make,
            lambda replica: (placement, there[replica.name]),
            learner,
            self._engine_need(1) if options.engines == "auto" else None,
            lambda: self.sampling.counters.sampled,
        )
        stack.push_async_callback(elastic.give_back)
        stack.push_async_callback(self.sampling.close)
        # A new adapter is drawn once, by the learner.
        lacking = spec.trained if served.lora_rank is not None else []
        await self.sampling.start({alias: (await self.learner(alias).info()).version for alias in lacking})
        await stack.enter_async_context(elastic.running())

        async def remove_files() -> None:
            await self._remove_files(self._hosts.values())

        stack.push_async_callback(remove_files)  # first of all, while there is who can

    async def _export(self, policy: str, path: str) -> None:
        await self.learner(policy).export(path)

    # ---- weights -----------------------------------------------------------------------------------------------------

    async def publish(self, policy: str) -> int:
        """See `Backend.publish`. An engine that is lost meanwhile gets the weights when it is back."""
        version = await self.learner(policy).publish()
        if version != self.sampling.engine(policy).version:
            await self.sampling.publish(policy, version)
        return version

    async def take_up(self, policy: str, uri: str) -> None:
        name = f"taken-up-{next(self._numbers)}"
        await self._spread(uri, name, self._learners[:1])
        await self.learner(policy).take_up(self._there(name))
        await self.sampling.publish(policy, (await self.learner(policy).info()).version)

    async def checkpoint(self, uri: str) -> None:
        base = self._settings.model if self._spec.adapters else base_of(Path(self._settings.model))
        for alias, model, optimizer in self._places(uri):
            await self._fetch(self.learner(alias).export, model, base or self._settings.model)
            await self._fetch(self.learner(alias).save_state, optimizer, None)

    async def _fetch(self, write: Any, path: str, base: str | None) -> None:
        """Have the learner write a folder, and bring it here; an adapter in it stands on `base`."""
        name = f"checkpoint-{next(self._numbers)}"
        await write(self._there(name))
        packed = await self._learners[0].ask("pack", name)
        await asyncio.to_thread(unpack, packed, Path(path))
        if base is not None:
            set_base(Path(path), base)

    async def restore(self, uri: str) -> None:
        for alias, _, optimizer in self._places(uri):
            name = f"checkpoint-{next(self._numbers)}"
            await self._spread(optimizer, name, self._learners)
            await self.learner(alias).load_state(self._there(name))
            await self.publish(alias)

    async def _spread(self, path: str, name: str, hosts: Sequence[Placed]) -> None:
        """Bring a folder of this machine to those of the hosts."""
        import ray  # pyright: ignore[reportMissingImports]

        packed = ray.put(await asyncio.to_thread(pack, Path(path)))
        await asyncio.gather(*(host.ask("unpack", packed, name) for host in one_per_machine(hosts)))

    def _there(self, name: str) -> str:
        return str(Path(self._folder) / name)

    # ---- the rest of the seam ----------------------------------------------------------------------------------------

    def engine(self, policy: str) -> RayEngine | VLLMEngine:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.sampling.engine(policy)

    async def pause(self) -> None:
        await self.sampling.pause()

    async def resume(self) -> None:
        await self.sampling.resume()

    async def reseed(self, seed: int) -> None:
        await self.sampling.reseed(seed)

    async def watch(self) -> NoReturn:
        """Wait until a rank of the learner or the last engine ends by itself."""
        await first_end(self.process.watch(), self.sampling.watch())

    @property
    def drain(self) -> Drain | None:
        """See `Drains`."""
        return None if self._learner_places is None else self._learner_places.drain

    async def stats(self) -> BackendStats:
        sampling = self.sampling
        return sampling.counters.as_stats(await self.process.stats(), sampling.fleet, sampling.published_bytes)

    async def close(self) -> None:
        await self._stack.aclose()


_PRECISIONS = ("float32", "bfloat16")


def _refuse_for_verl(spec: ModelSpec, options: RayOptions) -> None:
    """Raises ConfigError for what rows through verl's workers cannot do, with what to change."""
    own = "or take learner='own'."
    checks = {
        f"train one policy: leave policies out, {own}": not spec.adapters,
        f"keep layers whole: leave tensor_parallel out, {own}": spec.tensor_parallel == 1,
        f"have no critic: take credit='broadcast', {own}": not spec.critic,
        f"compute in {' or '.join(_PRECISIONS)}: set dtype, {own}": spec.dtype in _PRECISIONS,
        f"share a row among {options.sequence_parallel}: let ranks be a multiple of sequence_parallel.": (
            spec.ranks % options.sequence_parallel == 0
        ),
        "offload by an option of the backend's: set backend_options={'offload': True}, and leave the setting out.": (
            not spec.offload
        ),
    }
    _refuse(checks)


def _refuse(checks: Mapping[str, bool]) -> None:
    for words, holds in checks.items():
        if not holds:
            raise ConfigError(f"verl's workers {words}")


def driver_settings(settings: ProcessSettings, options: RayOptions, gpus: float) -> ProcessSettings:
    """The settings of the process that drives verl's workers. Raises ConfigError for what those devices cannot do."""
    flash = (
        "share a row on GPUs in bfloat16 only (FlashAttention): set dtype='bfloat16', or leave sequence_parallel out."
    )
    _refuse(
        {
            flash: not gpus or options.sequence_parallel == 1 or settings.dtype == "bfloat16",
            "have nothing to offload from a CPU: leave offload out.": bool(gpus) or not options.offload,
        }
    )
    sizes = Sizes(
        workers=settings.ranks,
        sequence_parallel=options.sequence_parallel,
        offload=options.offload,
        cpus=options.cpus_per_rank,
        gpus=gpus,
    )
    return msgspec.structs.replace(settings, device="cpu", ranks=1, verl=sizes)
