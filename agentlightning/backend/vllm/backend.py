"""The vLLM backend: servers that sample, one learner process of ours, and the publications between them."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NoReturn

import msgspec

from agentlightning.backend.base import BackendStats, ModelSpec
from agentlightning.backend.embedded.backend import EmbeddedBackend, check_cores, settings_of
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.fleet import first_end
from agentlightning.backend.vllm.broadcast import Broadcast
from agentlightning.backend.vllm.engine import VLLMEngine
from agentlightning.backend.vllm.options import find_vllm, parse_options, shared_memory
from agentlightning.backend.vllm.process import (
    LOOPBACK,
    ServerContent,
    ServerProcess,
    arguments,
    environment,
    free_port,
    is_on_cpu,
)
from agentlightning.backend.vllm.publication import SharedFolder
from agentlightning.backend.vllm.replica import Bring, Replica
from agentlightning.backend.vllm.servers import Servers
from agentlightning.engine.base import EngineInfo
from agentlightning.engine.limits import MIN_CONTEXT
from agentlightning.errors import ConfigError
from agentlightning.keys import new_key
from agentlightning.models import resolve_model
from agentlightning.models.hardware import memory_of
from agentlightning.models.shape import BYTES_OF, ModelShape, read_shape
from agentlightning.reading import read_object


class VLLMBackend(EmbeddedBackend):
    """See `Backend`. The learner is the model process of the embedded backend, which samples nothing here."""

    servers: Servers

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._options = parse_options(spec.backend_options)
        check_cores(spec.ranks)
        self._learner_settings = msgspec.structs.replace(settings_of(spec), max_context=MIN_CONTEXT, max_concurrency=1)
        self._make_process()
        self._stack = AsyncExitStack()

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
        spec, served = self._spec, served_by(self._spec, self._options.replicas)
        folder = Path(tempfile.mkdtemp(prefix="agl-weights-", dir=self._options.exchange or shared_memory()))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        exchange = self._exchange(folder, served)
        stack.push_async_callback(exchange.close)
        self.servers = Servers(spec, served, info, exchange, lambda bring: self._replicas(served, bring, program))
        stack.push_async_callback(self.servers.close)
        # Adapters, and servers that somebody else started, get their first weights like all others.
        lacking = spec.trained if served.lora_rank is not None or self._options.urls else ()
        await self.servers.start(dict.fromkeys(lacking, info.version))

    def _exchange(self, folder: Path, served: ServerContent) -> SharedFolder | Broadcast:
        """Raises ConfigError where there is nothing to send over."""
        shared, way = SharedFolder(folder, self._export), self._options.weight_transfer
        if way == "files":
            return shared
        if way == "nccl" and served.on_cpu:
            raise ConfigError("weight_transfer='nccl' is between GPUs; without them take 'gloo' or 'files'.")
        return Broadcast(shared, folder, way, self._log_folder() / "weight-transfer.log")

    def _replicas(self, served: ServerContent, bring: Bring, program: str | None) -> list[Replica]:
        options, start = self._options, self._options.start_seconds
        if program is None:
            return [
                Replica(f"vLLM at {url}", url, api_key=options.api_key, launch=None, bring=bring, start_seconds=start)
                for url in options.urls
            ]

        key = options.api_key or new_key()

        def replica(number: int) -> Replica:
            log = self._log_folder() / f"vllm-{number}.log"

            async def launch() -> tuple[str, ServerProcess]:
                port = free_port()
                command = arguments(program, served, options, LOOPBACK, port)
                devices = options.devices[number] if options.devices else None
                process = await ServerProcess.start(command, environment(options, key, devices), log)
                return f"http://{LOOPBACK}:{port}", process

            return Replica(
                f"vLLM server {number}",
                f"http://{LOOPBACK}",
                api_key=key,
                launch=launch,
                bring=bring,
                start_seconds=start,
                restarts=options.restarts,
            )

        return [replica(number) for number in range(options.replicas)]

    def _log_folder(self) -> Path:
        return Path(self._spec.folder or tempfile.gettempdir())

    async def _export(self, policy: str, path: str) -> None:
        await self.process.policy(policy).export(path)

    def engine(self, policy: str) -> VLLMEngine:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.servers.engine(policy)

    async def publish(self, policy: str) -> int:
        """See `Backend.publish`."""
        version = await self.process.policy(policy).publish()
        if version != self.servers.engine(policy).version:
            await self.servers.publish(policy, version)
        return version

    async def take_up(self, policy: str, uri: str) -> None:
        handle = self.process.policy(policy)
        await handle.take_up(uri)
        await self.servers.publish(policy, (await handle.info()).version)

    async def pause(self) -> None:
        await self.servers.pause()

    async def resume(self) -> None:
        await self.servers.resume()

    async def reseed(self, seed: int) -> None:
        await self.servers.reseed(seed)

    async def watch(self) -> NoReturn:
        """Wait until the learner's process or the last server ends by itself."""
        await first_end(self.process.watch(), self.servers.watch())

    async def stats(self) -> BackendStats:
        servers = self.servers
        return servers.counters.as_stats(await self.process.stats(), servers.fleet, servers.published_bytes)

    async def close(self) -> None:
        await self._stack.aclose()


def served_by(spec: ModelSpec, servers: int = 1) -> ServerContent:
    """What each of so many servers is to hold for a policy. Raises ModelError where there is no such model."""
    model, rank = resolve_model(spec.model), spec.lora_rank
    if (config := Path(model) / "adapter_config.json").is_file():
        adapter = read_object(config)
        model, rank = resolve_model(adapter["base_model_name_or_path"]), adapter["r"]
    elif rank is None and spec.adapters:
        rank = _DEFAULT_RANK
    shape = read_shape(model)
    longest = shape.max_context if shape is not None and shape.max_context is not None else spec.max_context
    return ServerContent(
        model=model,
        dtype=spec.dtype,
        on_cpu=is_on_cpu(spec.device),
        max_context=min(spec.max_context, longest),
        max_concurrency=spec.max_concurrency,
        lora_rank=rank,
        adapters=len(spec.trained) + len(spec.members),
        contexts_bytes=None if shape is None else _contexts_bytes(shape, spec, servers),
    )


def _contexts_bytes(shape: ModelShape, spec: ModelSpec, servers: int) -> int:
    """Twice what all requests need that may be under way, so that contexts stay for those that continue them; but no
    more than a server's part of the memory that is free: two that each took a share of the whole machine's, as vLLM
    does by itself, would leave nothing for anybody else."""
    wanted = 2 * shape.kv_numbers * BYTES_OF.get(spec.dtype, 4) * spec.max_context * spec.max_concurrency
    free, _ = memory_of("cpu")
    return wanted if free is None else min(wanted, int(_SHARE * free / servers))


_SHARE = 0.6
"""Of the free memory that contexts may take."""
_DEFAULT_RANK = 16
"""Of several policies' adapters, where none is given (`LoraSpec`)."""
