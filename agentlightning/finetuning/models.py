"""Which models there are for a key, and what serves them: a model process for each that is asked for.

A model is loaded when the first request names it. Where as many are loaded as there may be, the one that has not been
asked for longest, and answers nothing just now, ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
import tomllib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from agentlightning.algorithm.base import PolicySpec
from agentlightning.algorithm.checkpoint import served_model
from agentlightning.backend import POLICY, Backend, ComputeSettings, ModelSettings, ModelSpec
from agentlightning.errors import AgentLightningError, ConfigError, EngineError
from agentlightning.files import reason_of_file
from agentlightning.finetuning.jobs import Jobs, name_of
from agentlightning.finetuning.progress import checkpoint_of
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.records import JobEvent
from agentlightning.finetuning.wire import bad
from agentlightning.gateway import Gateway
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.routing.models import Frozen
from agentlightning.gateway.serving.anonymous import AnonymousAccess
from agentlightning.gateway.settings import CallSettings
from agentlightning.store import InMemoryLightningStore
from agentlightning.trainer.serving import forget_old_requests, start_backend

logger = logging.getLogger(__name__)

INSTEAD = ("importance_sampling", "ppo", "cispo")
"""Losses that may be computed where a client of `tinker` asks for `stable_reinforce`."""


def read_bases(file: Path | None, named: Sequence[str]) -> dict[str, BaseModel]:
    """The models that a file maps names to, and those named on the command line, which have their own names.

    The file is TOML or JSON: a name and its model, or a table of `model` and settings of training. Raises ConfigError.
    """
    found = {name: BaseModel(name, name) for name in named}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
            given = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The base models cannot be read from {file}: {reason_of_file(error)}") from None
        found |= {name: _base(name, value, file) for name, value in given.items()}
    if not found:
        raise ConfigError("Say which models can be trained: name one, or map names to models in --base-models FILE.")
    return found


def _base(name: str, value: Any, file: Path) -> BaseModel:
    given = {"model": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or not isinstance(given.get("model"), str) or ":" in name:
        raise ConfigError(
            f'{file}: "{name}" is to be a model, or a table with one: {{model = "Qwen/Qwen3-0.6B", lora_rank = 16}}; '
            "and a name has no colon."
        )
    settings = {key: given[key] for key in given if key not in ("model", "stable_reinforce")}
    instead = given.get("stable_reinforce")
    if instead not in (None, *INSTEAD):
        raise ConfigError(f'{file}: stable_reinforce of "{name}" is {instead!r}; it can be {", ".join(INSTEAD)}.')
    return BaseModel(name, given["model"], settings, instead)


class Catalog:
    """The base models, and those that came of each key's jobs."""

    def __init__(self, bases: Mapping[str, BaseModel]) -> None:
        self.bases = bases
        self.jobs: Jobs | None = None
        self.saved: Callable[[str, str], str | None] = lambda owner, name: None
        """The folder of the weights that a key saved by another API under this name."""
        self.began = int(time.time())

    def find(self, owner: str, name: str) -> BaseModel:
        """What a name means to a key. Raises `Refusal` with the names that there are."""
        if (base := self.bases.get(name)) is not None:
            return base
        assert self.jobs is not None
        if (folder := self.saved(owner, name)) is not None:
            return BaseModel(name, folder)
        if (found := self.jobs.of_model(owner, name)) is not None:
            row, step = found
            checkpoint = checkpoint_of(self.jobs.folder(row["id"]), step)
            if checkpoint is not None and (step is not None or row["status"] == "succeeded"):
                start = name.split(":")[1]
                return BaseModel(name, str(checkpoint), self.bases[start].settings if start in self.bases else {})
        known = ", ".join([*self.bases, *self._made(owner)][:50])
        raise Refusal(
            f"The model '{name[:200]}' does not exist here. There are: {known}.",
            status=404,
            code="model_not_found",
            param="model",
        )

    def for_job(self, owner: str, name: str) -> BaseModel:
        """The same as what a job starts from: an unknown one is a wrong value."""
        try:
            return self.find(owner, name)
        except Refusal as refusal:
            raise bad(refusal.message, "model", "model_not_found") from None

    def _made(self, owner: str) -> dict[str, int]:
        """The names of the models that came of a key's jobs, and since when each is there."""
        assert self.jobs is not None
        rows = self.jobs.records.rows(
            "SELECT * FROM jobs WHERE owner = ? AND status = 'succeeded' AND NOT model_deleted ORDER BY seq", owner
        )
        return {name_of(row): row["finished_at"] for row in rows}

    def list(self, owner: str) -> list[dict[str, Any]]:
        since = {**dict.fromkeys(self.bases, self.began), **self._made(owner)}
        return [self.seen(name, created) for name, created in since.items()]

    def seen(self, name: str, created: int | None = None) -> dict[str, Any]:
        """A model as clients see it."""
        owner = "org-local" if name.startswith("ft:") else "system"
        return {"id": name, "object": "model", "created": created or self.began, "owned_by": owner}

    def delete(self, owner: str, name: str) -> str:
        """Delete the model of a job, with its checkpoints; the job's id. Raises `Refusal`."""
        assert self.jobs is not None
        if name in self.bases:
            raise Refusal(f"{name} is a base model, which its owner maps.", status=403, kind="permission_error")
        self.find(owner, name)
        found = self.jobs.of_model(owner, name)
        assert found is not None, "it is no base model"
        row, step = found
        if step is not None or row["status"] != "succeeded":
            raise bad("A checkpoint is deleted with its model.", "model")
        with self.jobs.records.transaction():
            self.jobs.records.change("jobs", row["id"], model_deleted=1)
            self.jobs.records.say(row["id"], [JobEvent(name="model_deleted", message=f"The model {name} was deleted")])
        self.sweep()
        return row["id"]

    def sweep(self) -> None:
        """Remove the checkpoints of models that were deleted, also by a server that was killed before it came to it."""
        assert self.jobs is not None
        for row in self.jobs.records.rows("SELECT id FROM jobs WHERE model_deleted"):
            shutil.rmtree(self.jobs.folder(row["id"]) / "checkpoints", ignore_errors=True)


@dataclass
class _Loaded:
    """A model that is loaded."""

    model: Frozen
    stack: AsyncExitStack
    uses: int = 0
    watch: asyncio.Task[None] | None = None
    unused: asyncio.Event = field(default_factory=asyncio.Event)


class Pool:
    """The model processes, behind one gateway."""

    def __init__(self, most: int, max_context: int, answer_minutes: float = 60.0) -> None:
        """`most`: models that are loaded at the same time."""
        self._most = most
        self._max_context = max_context
        self._loaded: OrderedDict[str, _Loaded] = OrderedDict()
        """By the model's path, the one asked for longest ago first."""
        self._names: dict[str, str] = {}
        """The path of what each name means."""
        self._changing = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._access: AnonymousAccess | None = None
        self._gateway: Gateway | None = None

    async def close(self) -> None:
        """End all."""
        await self._stack.aclose()
        for path in list(self._loaded):
            await self._end(path)

    @asynccontextmanager
    async def serving(self, base: BaseModel) -> AsyncIterator[AnonymousAccess]:
        """What answers requests for a model by its name, which stays loaded within the block.

        Raises ModelError, ConfigError or EngineError where it cannot be loaded.
        """
        loaded = self._loaded.get(base.model)
        if loaded is None or self._names.get(base.name) != base.model:
            async with self._changing:
                loaded = await self._ready(base)
        self._loaded.move_to_end(base.model)
        loaded.uses += 1
        loaded.unused.clear()
        try:
            assert self._access is not None
            yield self._access
        finally:
            loaded.uses -= 1
            if not loaded.uses:
                loaded.unused.set()

    async def forget(self, belongs: Callable[[str], bool]) -> None:
        """End the models whose names belong to what was deleted."""
        await self._forget({path for name, path in self._names.items() if belongs(name)})

    async def forget_below(self, folder: Path) -> None:
        """End the models whose weights are in this folder."""
        await self._forget({path for path in self._loaded if Path(path).is_relative_to(folder)})

    async def _forget(self, paths: Collection[str]) -> None:
        if not paths:
            return
        async with self._changing:
            for path in paths:
                await self._end(path)
            await self._route()

    async def _ready(self, base: BaseModel) -> _Loaded:
        """The model, loaded, under its name."""
        loaded = self._loaded.get(base.model)
        if loaded is None:
            await self._end_an_idle_one()
            loaded = await self._load(base)
        if self._names.get(base.name) != base.model:
            self._names[base.name] = base.model
            await self._route()
        return loaded

    async def _end_an_idle_one(self) -> None:
        while len(self._loaded) >= self._most:
            idle = next((path for path, one in self._loaded.items() if not one.uses), None)
            if idle is None:
                waits = [asyncio.ensure_future(one.unused.wait()) for one in self._loaded.values()]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
                continue
            await self._end(idle)

    async def _load(self, base: BaseModel) -> _Loaded:
        stack = AsyncExitStack()
        known = {one.name for kind in (ModelSettings, ComputeSettings) for one in fields(kind)}
        given = {name: value for name, value in base.settings.items() if name in known and name != "lora_rank"}
        try:
            path = stack.enter_context(served_model(base.model))  # a checkpoint is not removed while it is served
            spec = ModelSpec(**{"max_context": self._max_context, **given, "model": path})
            kind = base.settings.get("backend", "embedded")
            backend, rendering = await start_backend(stack, PolicySpec(spec, CallSettings(), kind))
        except BaseException:
            await stack.aclose()
            raise
        loaded = self._loaded[base.model] = _Loaded(Frozen(backend.engine(POLICY), rendering), stack)
        loaded.unused.set()
        loaded.watch = asyncio.create_task(self._watch(base.model, backend))
        return loaded

    async def _watch(self, path: str, backend: Backend) -> None:
        try:
            await backend.watch()
        except EngineError as error:
            logger.warning("%s It is loaded again when it is asked for.", error)
        async with self._changing:
            await self._end(path)
            await self._route()

    async def _end(self, path: str) -> None:
        loaded = self._loaded.pop(path, None)
        self._names = {name: meant for name, meant in self._names.items() if meant != path}
        if loaded is None:
            return
        if loaded.watch is not None and loaded.watch is not asyncio.current_task():
            loaded.watch.cancel()
        with suppress(AgentLightningError):
            await loaded.stack.aclose()

    async def _route(self) -> None:
        """Let the gateway know which names there are."""
        models = {name: self._loaded[path].model for name, path in self._names.items()}
        if self._gateway is not None:
            await self._gateway.update_model_list(models)
        elif models:
            store = InMemoryLightningStore()
            self._stack.push_async_callback(store.close)
            gateway = Gateway(store, None, None, models=models)
            await gateway.start()
            self._stack.push_async_callback(gateway.stop)
            self._gateway, self._access = gateway, AnonymousAccess(gateway, store, None)
            self._stack.push_async_callback(self._access.close)
            pruning = asyncio.create_task(forget_old_requests(store))
            self._stack.callback(pruning.cancel)
