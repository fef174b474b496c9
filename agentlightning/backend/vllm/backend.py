"""The vLLM backend: servers that sample, one learner process of ours, and the publications between them."""

from __future__ import annotations

import json
import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

import msgspec

from agentlightning.backend.base import BackendStats, ModelSpec
from agentlightning.backend.embedded.backend import EmbeddedBackend, settings_of
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.fleet import Fleet, first_end
from agentlightning.backend.seeds import Seeds
from agentlightning.backend.vllm.command import Served, arguments, environment, is_on_cpu
from agentlightning.backend.vllm.engine import Sampling, VLLMEngine
from agentlightning.backend.vllm.gate import Gate
from agentlightning.backend.vllm.options import find_vllm, parse_options
from agentlightning.backend.vllm.process import ServerProcess, free_port
from agentlightning.backend.vllm.publication import AdapterPublication, Publication, WeightsPublication
from agentlightning.backend.vllm.replica import Replica
from agentlightning.engine.base import EngineInfo
from agentlightning.engine.limits import MIN_CONTEXT
from agentlightning.models import resolve_model
from agentlightning.models.shape import read_shape

_SHARED_MEMORY = Path("/dev/shm")


class VLLMBackend(EmbeddedBackend):
    """See `Backend`. The learner is the model process of the embedded backend, which samples nothing here."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = parse_options(spec.backend_options)
        self._learner_settings = msgspec.structs.replace(settings_of(spec), max_context=MIN_CONTEXT, max_concurrency=1)
        self._make_process()
        self._stack = AsyncExitStack()
        self._engines: dict[str, VLLMEngine] = {}
        self._paused = False

    async def start(self) -> None:
        program = None if self._options.urls else find_vllm(self._options.command)
        self._make_process()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.process.close)
            info = await self.process.start()
            await self._start_sampling(stack, info, program)
            self._stack = stack.pop_all()

    def _make_process(self) -> None:
        self.process = ModelProcess(self._learner_settings, spawn=self.spawn)

    async def _start_sampling(self, stack: AsyncExitStack, info: EngineInfo, program: str | None) -> None:
        """Servers with the learner's weights."""
        spec, served = self._spec, served_by(self._spec)
        exchange = Path(tempfile.mkdtemp(prefix="agl-weights-", dir=self._options.exchange or _shared_memory()))
        stack.callback(shutil.rmtree, exchange, ignore_errors=True)
        gate = Gate()
        publication: Publication = (
            AdapterPublication(exchange, self._export)
            if served.lora_rank is not None
            else WeightsPublication(exchange, self._export, gate, info.version)
        )
        fleet = Fleet(self._replicas(served, publication, program))
        shared = Sampling(
            fleet=fleet,
            gate=gate,
            publication=publication,
            in_flight=spec.in_flight,
            info=msgspec.structs.replace(
                info, max_context=served.max_context, max_concurrency=served.max_concurrency * len(fleet.replicas)
            ),
            seeds=Seeds(spec.seed),
        )
        self._shared = shared
        frozen = [spec.frozen] if spec.frozen is not None else []
        self._engines = {alias: VLLMEngine(alias, shared) for alias in (*spec.trained, *spec.members, *frozen)}
        # Adapters, and servers that somebody else started, get their first weights like all others: before `start`
        # ends they have been brought to every replica.
        if served.lora_rank is not None or self._options.urls:
            for alias in spec.trained:
                await publication.publish(alias, info.version, [])
        stack.push_async_callback(fleet.close)
        await fleet.start()

    def _replicas(self, served: Served, publication: Publication, program: str | None) -> list[Replica]:
        options, start = self._options, self._options.start_seconds
        if program is None:
            return [
                Replica(
                    f"vLLM at {url}",
                    url,
                    api_key=options.api_key,
                    launch=None,
                    bring=publication.bring,
                    start_seconds=start,
                )
                for url in options.urls
            ]

        def replica(number: int) -> Replica:
            log = self._log_folder() / f"vllm-{number}.log"

            async def launch() -> tuple[str, ServerProcess]:
                port = free_port()
                command = arguments(program, served, options, port)
                process = await ServerProcess.start(command, environment(served, options, number), log)
                return f"http://127.0.0.1:{port}", process

            return Replica(
                f"vLLM server {number}",
                "http://127.0.0.1",
                api_key=options.api_key,
                launch=launch,
                bring=publication.bring,
                start_seconds=start,
                restarts=options.restarts,
            )

        return [replica(number) for number in range(options.replicas)]

    def _log_folder(self) -> Path:
        return Path(self._spec.folder or tempfile.gettempdir())

    async def _export(self, policy: str, path: str) -> None:
        await self.process.policy(policy).export(path)

    def engine(self, policy: str) -> VLLMEngine:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._engines[policy]

    async def publish(self, policy: str) -> int:
        """See `Backend.publish`. A failure leaves the servers that did not take the weights unused."""
        engine, version = self._engines[policy], await self.process.policy(policy).publish()
        if version != engine.version:
            await self._shared.publication.publish(policy, version, self._shared.fleet.ready)
            engine.version = version
        return version

    async def take_up(self, policy: str, uri: str) -> None:
        handle, engine = self.process.policy(policy), self._engines[policy]
        await handle.take_up(uri)
        version = (await handle.info()).version
        await self._shared.publication.publish(policy, version, self._shared.fleet.ready)
        engine.version = version

    async def pause(self) -> None:
        if not self._paused:
            self._paused = True
            await self._shared.gate.close()

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            await self._shared.gate.open()

    async def reseed(self, seed: int) -> None:
        self._shared.seeds.reseed(seed)
        for replica in self._shared.fleet.ready:
            await replica.api.forget_contexts()

    async def watch(self) -> NoReturn:
        """Wait until the learner's process or the last server ends by itself."""
        await first_end(self.process.watch(), self._shared.fleet.watch())

    async def stats(self) -> BackendStats:
        learner = await self.process.stats()
        return self._shared.counters.as_stats(learning_s=learner.learning_s, idle_s=learner.idle_s)

    async def close(self) -> None:
        await self._stack.aclose()


def served_by(spec: ModelSpec) -> Served:
    """What servers are to hold for a policy. Raises ModelError where there is no such model."""
    model, rank = resolve_model(spec.model), spec.lora_rank
    if (config := Path(model) / "adapter_config.json").is_file():
        adapter = json.loads(config.read_text())
        model, rank = resolve_model(adapter["base_model_name_or_path"]), adapter["r"]
    elif rank is None and spec.adapters:
        rank = _DEFAULT_RANK
    shape = read_shape(model)
    longest = shape.max_context if shape is not None and shape.max_context is not None else spec.max_context
    return Served(
        model=model,
        dtype=spec.dtype,
        on_cpu=is_on_cpu(spec.device),
        max_context=min(spec.max_context, longest),
        max_concurrency=spec.max_concurrency,
        lora_rank=rank,
        adapters=len(spec.trained) + len(spec.members),
    )


_DEFAULT_RANK = 16
"""Of several policies' adapters, where none is given (`LoraSpec`)."""


def _shared_memory() -> str | None:
    return str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
