"""What goes to the machines of a cluster: models that are not there, or are others, and the weights after each step."""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.backend.embedded.protocol import Settings
from agentlightning.backend.ray.folder import base_of, checksums, pack
from agentlightning.backend.ray.server import Placed
from agentlightning.errors import AgentLightningError
from agentlightning.models import resolve_model


async def carried(
    settings: Settings, hosts: Sequence[Placed], folder: str, *, beside: Sequence[Placed] = ()
) -> Settings:
    """The settings with paths that all these hosts' machines have, and of the model also those of the hosts `beside`.
    `folder` is where carried models are; a name of the hub stays as it is, each machine loads that itself."""

    async def moved(path: str) -> str:
        return await carried_folder(path, hosts, folder)

    reference = settings.learner.reference
    return msgspec.structs.replace(
        settings,
        model=await carried_folder(settings.model, [*hosts, *beside], folder),
        policies={alias: path and await moved(path) for alias, path in settings.policies.items()},
        learner=msgspec.structs.replace(settings.learner, reference=reference and await moved(reference)),
    )


async def carried_folder(path: str, hosts: Sequence[Placed], folder: str) -> str:
    """The same for one path, and for the model that an adapter in it stands on."""
    if not is_folder(path):
        return path
    machines = list({host.address.host: host for host in hosts}.values())
    base = base_of(Path(path))
    base_there = None if base is None else await carried_folder(resolve_model(base), hosts, folder)
    sums = await asyncio.to_thread(checksums, Path(path))
    there = await asyncio.gather(*(machine.ask("has", path, sums) for machine in machines))
    if all(there) and base_there in (None, base):
        return path
    return await _carry(path, machines, folder, base_there)


def is_folder(path: str) -> bool:
    return Path(path).is_dir()


async def _carry(path: str, machines: Sequence[Placed], folder: str, base: str | None) -> str:
    import ray  # pyright: ignore[reportMissingImports]

    name = f"model-{zlib.crc32(path.encode()):08x}"
    packed = ray.put(await asyncio.to_thread(pack, Path(path)))
    await asyncio.gather(*(machine.ask("unpack", packed, name, base) for machine in machines))
    return str(Path(folder) / name)


class Weights:
    """Weights of the learner in Ray's object store, under names, from where every machine can take them."""

    def __init__(self, export: Callable[[str, str], Awaitable[None]], learner: Placed, folder: str) -> None:
        """`export` has the learner write those of a policy into a directory on its machine."""
        self.folder = folder
        """Of the same name on every machine."""
        self._export = export
        self._learner = learner
        self._packed: dict[str, Any] = {}
        self._given: dict[tuple[str, str, int], tuple[Placed, str]] = {}
        """By name, machine and process that has them: the host, and where it has them."""

    async def put(self, policy: str, name: str, *, summed: bool = False) -> dict[str, int]:
        """`summed`: the checksums of its tensors."""
        await self._export(policy, str(Path(self.folder) / name))
        sums = await self._learner.ask("sums", name) if summed else {}
        self._packed[name] = self._learner.actor.pack.remote(name)
        return sums

    async def give_to(self, host: Placed, name: str) -> str:
        """Where a host has them, brought there if they were not yet. Raises BackendDied where it is gone."""
        key = name, host.address.host, host.pid
        if key not in self._given:
            self._given[key] = host, await host.ask("take", self._packed[name], name)
        return self._given[key][1]

    async def take_from(self, host: Placed, name: str) -> None:
        """Raises BackendDied where the host is gone."""
        if self._given.pop((name, host.address.host, host.pid), None) is not None:
            await host.ask("drop", name)

    async def forget(self, name: str) -> None:
        """Nobody will be given them again."""
        self._packed.pop(name, None)
        for host in [host for (given, _, _), (host, _) in self._given.items() if given == name]:
            with suppress(AgentLightningError):
                await self.take_from(host, name)
