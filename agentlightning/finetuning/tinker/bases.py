"""The base models: a model process for each that is in use, with the adapters of all who train or sample on it.

A process starts when the first client needs it. Adapters that only sample are loaded from their checkpoints when they
are asked for, and those that were not asked for longest make room for others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

import msgspec

from agentlightning.algorithm.checkpoint import served_model
from agentlightning.backend import ComputeSettings, ModelSettings, ModelSpec
from agentlightning.backend.embedded.backend import settings_of
from agentlightning.backend.embedded.client import ModelProcess, PolicyHandle
from agentlightning.engine.base import EngineInfo
from agentlightning.errors import AgentLightningError, ConfigError, EngineError
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.gateway.exchange import Refusal

logger = logging.getLogger(__name__)

BASE = "base"
"""The policy that is the model without an adapter."""
MOST_SAMPLED = 16
"""Adapters of one base that are loaded to sample at the same time."""
MOST_TRAINED = 32
"""Adapters of one base that are trained at the same time."""


@dataclass
class _Sampled:
    """An adapter that is loaded to sample."""

    handle: PolicyHandle
    ready: asyncio.Task[None]
    uses: int = 0


@dataclass
class LoadedBase:
    """A base model whose process runs."""

    name: str
    process: ModelProcess
    info: EngineInfo
    stack: AsyncExitStack
    trained: set[str] = field(default_factory=set)
    """The training clients that have an adapter here."""
    uses: int = 0
    died: str | None = None
    """How the process ended, where it has."""
    _sampled: OrderedDict[str, _Sampled] = field(default_factory=OrderedDict)

    @property
    def is_idle(self) -> bool:
        return not self.trained and not self.uses

    def policy(self, name: str) -> PolicyHandle:
        """Raises EngineError where the process is gone."""
        if self.died is not None:
            raise EngineError(f"{self.died} What was not saved is lost; create a client from the last saved state.")
        return self.process.policy(name)

    @asynccontextmanager
    async def sampling(self, adapter: Path | None) -> AsyncIterator[PolicyHandle]:
        """The model with the adapter in a folder, which stays loaded within the block; None is the model itself.

        Raises `Refusal` while all that may be loaded are in use.
        """
        self.uses += 1
        try:
            if adapter is None:
                yield self.policy(BASE)
                return
            one = await self._loaded(adapter)
            try:
                await asyncio.shield(one.ready)
                yield one.handle
            finally:
                one.uses -= 1
        finally:
            self.uses -= 1

    async def _loaded(self, adapter: Path) -> _Sampled:
        key = str(adapter)
        one = self._sampled.get(key)
        if one is not None and one.ready.done() and (one.ready.cancelled() or one.ready.exception()):
            one = self._sampled.pop(key) and None
        if one is None:
            self._end_an_idle_one()
            handle = self.policy(f"sampler-{hashlib.sha256(key.encode()).hexdigest()[:16]}")
            one = self._sampled[key] = _Sampled(handle, asyncio.ensure_future(handle.add(key, learns=False)))
        self._sampled.move_to_end(key)
        one.uses += 1
        return one

    def _end_an_idle_one(self) -> None:
        while len(self._sampled) >= MOST_SAMPLED:
            idle = next((key for key, one in self._sampled.items() if not one.uses), None)
            if idle is None:
                words = f"{MOST_SAMPLED} other adapters are being sampled on this base model; try again."
                raise Refusal(words, status=429, code="busy")
            self._end(self._sampled.pop(idle))

    async def changed(self, adapter: Path) -> None:
        """The adapter in a folder has other weights: what samples from it goes on with these."""
        one = self._sampled.get(str(adapter))
        if one is not None:
            await one.handle.take_up(str(adapter))

    def forget(self, folder: Path) -> None:
        """What lies in this folder is deleted, or about to be."""
        for key in [key for key in self._sampled if Path(key).is_relative_to(folder)]:
            self._end(self._sampled.pop(key))

    def _end(self, one: _Sampled) -> None:
        async def remove() -> None:
            with suppress(AgentLightningError):
                await one.ready
                await one.handle.remove()

        task = asyncio.ensure_future(remove())
        self.stack.callback(task.cancel)


class Bases:
    """All base models, and the processes of those in use."""

    def __init__(self, models: Mapping[str, BaseModel], most: int, max_context: int) -> None:
        """`most`: processes at the same time."""
        self.models = models
        self._most = most
        self._max_context = max_context
        self._loaded: dict[str, LoadedBase] = {}
        self._changing = asyncio.Lock()
        self.on_death: Callable[[LoadedBase], None] = lambda loaded: None

    def find(self, name: str | None) -> BaseModel:
        """Raises `Refusal` with the names that there are."""
        if name is not None and (base := self.models.get(name)) is not None:
            return base
        raise Refusal(
            f"There is no base model '{str(name)[:200]}' here. There are: {', '.join(self.models)}.",
            code="model_not_found",
            param="base_model",
        )

    def loaded(self) -> list[LoadedBase]:
        return list(self._loaded.values())

    async def ready(self, name: str) -> LoadedBase:
        """The base model with its process running. Raises ModelError, ConfigError or EngineError where it cannot be
        loaded, `Refusal` where others take all the room."""
        loaded = self._loaded.get(name)
        if loaded is not None:
            return loaded
        async with self._changing:
            if name not in self._loaded:
                await self._end_an_idle_one()
                self._loaded[name] = await self._load(self.find(name))
            return self._loaded[name]

    async def close(self) -> None:
        for name in list(self._loaded):
            await self._end(name)

    async def _end_an_idle_one(self) -> None:
        if len(self._loaded) < self._most:
            return
        idle = next((name for name, one in self._loaded.items() if one.is_idle), None)
        if idle is None:
            raise Refusal(
                f"As many base models are in use as may be at the same time: {', '.join(self._loaded)}. Close the "
                "clients of one of them."
            )
        await self._end(idle)

    async def _load(self, base: BaseModel) -> LoadedBase:
        stack = AsyncExitStack()
        for name, only in (("backend", "embedded"), ("ranks", 1)):
            if base.settings.get(name, only) != only:
                raise ConfigError(
                    f"The base model '{base.name}' has {name} = {base.settings[name]!r}; clients of tinker need "
                    f"{only!r}, on which adapters come and go."
                )
        known = {one.name for kind in (ModelSettings, ComputeSettings) for one in fields(kind)} - {"lora_rank"}
        given = {name: value for name, value in base.settings.items() if name in known}
        try:
            path = stack.enter_context(served_model(base.model))
            spec = ModelSpec(**{"max_context": self._max_context, **given, "model": path})
            process = ModelProcess(msgspec.structs.replace(settings_of(spec), frozen=BASE, lora=None))
            info = await process.start()
            stack.push_async_callback(process.close)
        except BaseException:
            await stack.aclose()
            raise
        loaded = LoadedBase(base.name, process, info, stack)
        watching = asyncio.create_task(self._watch(loaded), name=f"watch-{base.name}")
        stack.callback(watching.cancel)
        return loaded

    async def _watch(self, loaded: LoadedBase) -> None:
        try:
            await loaded.process.watch()
        except EngineError as error:
            logger.warning("%s", error)
            loaded.died = str(error).splitlines()[0]
        if self._loaded.get(loaded.name) is loaded:
            del self._loaded[loaded.name]
        self.on_death(loaded)

    async def _end(self, name: str) -> None:
        loaded = self._loaded.pop(name)
        loaded.died = loaded.died or "The base model was unloaded."
        with suppress(AgentLightningError):
            await loaded.stack.aclose()
