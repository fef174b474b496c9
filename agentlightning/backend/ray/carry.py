"""Models on their way to the machines that load them: a folder that is not there, or is another, is carried over."""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentlightning.backend.embedded.protocol import Settings
from agentlightning.backend.ray.folder import base_of, checksums, pack
from agentlightning.backend.ray.server import Placed
from agentlightning.models import resolve_model


async def carried(settings: Settings, hosts: Sequence[Placed], folder: str) -> Settings:
    """The settings with paths that all these hosts' machines have. `folder` is where carried models are; a name of the
    hub stays as it is, each machine loads that itself."""
    machines = list({host.address.host: host for host in hosts}.values())

    async def moved(path: str | None) -> str | None:
        if path is None or not is_folder(path):
            return path
        base = base_of(Path(path))
        base_there = None if base is None else await moved(resolve_model(base))
        sums = await asyncio.to_thread(checksums, Path(path))
        there = await asyncio.gather(*(machine.ask("has", path, sums) for machine in machines))
        if all(there) and base_there in (None, base):
            return path
        return await _carry(path, machines, folder, base_there)

    model = await moved(settings.model)
    assert model is not None
    return msgspec.structs.replace(
        settings,
        model=model,
        policies={alias: await moved(path) for alias, path in settings.policies.items()},
        learner=msgspec.structs.replace(settings.learner, reference=await moved(settings.learner.reference)),
    )


def is_folder(path: str) -> bool:
    return Path(path).is_dir()


async def _carry(path: str, machines: Sequence[Placed], folder: str, base: str | None) -> str:
    import ray  # pyright: ignore[reportMissingImports]

    name = f"model-{zlib.crc32(path.encode()):08x}"
    packed = ray.put(await asyncio.to_thread(pack, Path(path)))
    await asyncio.gather(*(machine.ask("unpack", packed, name, base) for machine in machines))
    return str(Path(folder) / name)
