"""What is carried to the machines of a cluster: models that they lack or have in another state, and the weights after
each step, as packed folders whose files are arrays with checksums.

A folder is written once on each machine, under a name made from its content, and all processes there read the same one.
Which processes share a machine's folders they find out themselves: see `Host.listen`.
"""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec

from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.backend.ray.server import Placed
from agentlightning.errors import AgentLightningError, ModelError
from agentlightning.files import atomic_directory
from agentlightning.models import resolve_model
from agentlightning.reading import read_object
from agentlightning.types.arrays import np

Found = TypeVar("Found")

_REMOVE_SECONDS = 10.0
"""A host that has not removed a folder by then is taken to be gone."""


class CarriedModels:
    """The models of one run on the machines: brought where they are not."""

    def __init__(self, folder: str) -> None:
        """`folder` is where carried models are, on each machine."""
        self.folder = folder
        self._packed: WeakValueDictionary[str, _InStore] = WeakValueDictionary()
        """By path, as long as somebody is being given it."""
        self._known: dict[tuple[str, str], Any] = {}
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def carried(
        self, settings: ProcessSettings, hosts: Sequence[Placed], *, porters: Sequence[Placed] = ()
    ) -> ProcessSettings:
        """The settings with paths that all these hosts' machines have, and of the model also those of the
        `porters`. A name of the hub stays as it is, each machine loads that itself."""

        async def moved(path: str) -> str:
            return await self.path(path, hosts)

        reference = settings.learner.reference
        return msgspec.structs.replace(
            settings,
            model=await self.path(settings.model, [*hosts, *porters]),
            policies={alias: path and await moved(path) for alias, path in settings.policies.items()},
            learner=msgspec.structs.replace(settings.learner, reference=reference and await moved(reference)),
        )

    async def path(self, path: str, hosts: Sequence[Placed]) -> str:
        """Where all these hosts' machines have one folder, and the model that an adapter in it stands on."""
        if not is_folder(path):
            return path
        machines = one_per_machine(hosts)
        base = base_of(Path(path))
        base_there = None if base is None else await self.path(resolve_model(base), hosts)
        sums = await self._once(path, "", lambda: asyncio.to_thread(checksums, Path(path)))
        there = await asyncio.gather(
            *(self._once(path, host.machine, lambda host=host: host.ask("has", path, sums)) for host in machines)
        )
        if all(there) and base_there in (None, base):
            return path
        name = f"model-{digest_of({**sums, 'base': base_there or ''})}"
        held = await self._in_store(path)
        await asyncio.gather(*(self._write(host, held, name, base_there) for host in machines))
        return str(Path(self.folder) / name)

    async def _once(self, path: str, machine: str, find: Callable[[], Awaitable[Found]]) -> Found:
        """What is found out about a path on a machine; those who ask at the same time wait for the first."""
        async with self._locks[path, machine]:
            if (path, machine) not in self._known:
                self._known[path, machine] = await find()
            return self._known[path, machine]

    async def _in_store(self, path: str) -> _InStore:
        async with self._locks[path, "store"]:
            if (held := self._packed.get(path)) is None:
                import ray  # pyright: ignore[reportMissingImports]

                held = self._packed[path] = _InStore(ray.put(await asyncio.to_thread(pack, Path(path))))
            return held

    async def _write(self, host: Placed, held: _InStore, name: str, base: str | None) -> None:
        async with self._locks[name, host.machine]:
            await host.ask("unpack", held.reference, name, base)


class _InStore:
    """A folder in Ray's object store."""

    def __init__(self, reference: Any) -> None:
        self.reference = reference


class Weights:
    """Weights of the learner in Ray's object store, under names, from where every machine can take them.

    A machine's copy is written by the first of its hosts that is given them, and removed when the last one has read it.
    """

    def __init__(self, export: Callable[[str, str], Awaitable[None]], learner: Placed, models: CarriedModels) -> None:
        """`export` has the learner write those of a policy into a directory on its machine."""
        self.models = models
        self._folder = models.folder
        self._export = export
        self._learner = learner
        self._packed: dict[str, Any] = {}
        self.written_bytes = 0
        """On all machines, since the start."""
        self._written: dict[tuple[str, str], str] = {}
        """By name and machine, where they are."""
        self._readers: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
        """By name and machine, the processes that have not read them yet."""
        self._hosts: defaultdict[str, dict[int, Placed]] = defaultdict(dict)
        """By machine and process, who can remove files there."""
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def put(self, policy: str, name: str, *, summed: bool = False) -> dict[str, int]:
        """`summed`: the checksums of its tensors."""
        await self._export(policy, str(Path(self._folder) / name))
        sums = await self._learner.ask("sums", name) if summed else {}
        self._packed[name] = self._learner.actor.pack.remote(name)
        return sums

    def expect(self, name: str, hosts: Iterable[Placed]) -> None:
        """These will all be given them: a machine's copy stays until they have read it."""
        for host in hosts:
            self._readers[name, host.machine].add(host.pid)
            self._hosts[host.machine][host.pid] = host

    async def give_to(self, host: Placed, name: str) -> str:
        """Where a host has them, brought to its machine if they were not yet. Raises BackendDied where it is gone,
        ModelError where they came damaged."""
        self.expect(name, [host])
        key = name, host.machine
        async with self._locks[key]:
            if key not in self._written:
                self._written[key], written = await host.ask("take", self._packed[name], name)
                self.written_bytes += written
            return self._written[key]

    async def take_from(self, host: Placed, name: str) -> None:
        """The host reads them no more."""
        key = name, host.machine
        self._readers[key].discard(host.pid)
        if not self._readers[key]:
            await self._remove(key)

    async def look_again(self, host: Placed, name: str) -> None:
        """What this host was given could not be read: it is compared, and written again if need be, when it is given
        the next time."""
        async with self._locks[name, host.machine]:
            self._written.pop((name, host.machine), None)

    async def leave(self, host: Placed) -> None:
        """The host is gone, or will be: what it was the last to read is removed by another one of its machine."""
        self._hosts[host.machine].pop(host.pid, None)
        for name, machine in [key for key, readers in self._readers.items() if host.pid in readers]:
            if machine == host.machine:
                await self.take_from(host, name)

    async def forget(self, name: str) -> None:
        """Nobody will be given them again."""
        self._packed.pop(name, None)
        for key in [key for key in self._readers if key[0] == name]:
            await self._remove(key)

    async def _remove(self, key: tuple[str, str]) -> None:
        """By the first host of that machine that answers."""
        async with self._locks[key]:
            self._readers.pop(key, None)
            path = self._written.pop(key, None)
            for pid, host in list(self._hosts[key[1]].items()) if path is not None else ():
                try:
                    async with asyncio.timeout(_REMOVE_SECONDS):
                        await host.ask("drop", path)
                    break
                except (AgentLightningError, TimeoutError):
                    self._hosts[key[1]].pop(pid, None)
        self._locks.pop(key, None)


def one_per_machine(hosts: Iterable[Placed]) -> list[Placed]:
    """Of those that share a machine's files, the last."""
    return list({host.machine: host for host in hosts}.values())


def is_folder(path: str) -> bool:
    return Path(path).is_dir()


_ADAPTER = "adapter_config.json"
_BASE = "base_model_name_or_path"


@dataclass(frozen=True, slots=True)
class Packed:
    """The files of a folder by relative path. Ray shares the arrays without copying them."""

    files: Mapping[str, np.ndarray]
    checksums: Mapping[str, str]


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by relative path."""
    found: dict[str, str] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def digest_of(sums: Mapping[str, str]) -> str:
    """A short name for content with these checksums."""
    return hashlib.sha256(json.dumps(dict(sorted(sums.items()))).encode()).hexdigest()[:16]


def pack(folder: Path) -> Packed:
    sums = checksums(folder)
    return Packed({name: np.fromfile(folder / name, dtype=np.uint8) for name in sums}, sums)


def unpack(packed: Packed, folder: Path) -> None:
    """Write the folder, all of it or nothing. Raises ModelError where something was changed on the way."""
    with atomic_directory(folder) as work:
        _write(packed, work, folder)


def unpack_once(packed: Packed, folder: Path, base: str | None = None) -> None:
    """Write the folder where others may be writing or reading the very same; an adapter in it stands on `base`.
    Nothing that is there is replaced. Raises ModelError where something was changed on the way."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(packed, work, folder)
        if base is not None:
            set_base(work, base)
        work.rename(folder)
    except OSError:  # a folder takes no other's place: somebody else was first
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(packed: Packed, work: Path, folder: Path) -> None:
    for name, content in packed.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.tofile(path)
    if (wrong := checksums(work)) != dict(packed.checksums):
        names = sorted(n for n in packed.checksums if wrong.get(n) != packed.checksums[n])
        raise ModelError(f"Weights were damaged on their way to {folder}: {', '.join(names)}. Start the run again.")


def set_base(folder: Path, base: str) -> None:
    """Let the adapters in a folder stand on the model at `base`, which is somewhere else on each machine."""
    for file in folder.rglob(_ADAPTER):
        config = read_object(file)
        file.write_text(json.dumps({**config, _BASE: base}, indent=2))


def base_of(folder: Path) -> str | None:
    """The model that the adapter in a folder stands on; None where it holds none."""
    file = folder / _ADAPTER
    return str(read_object(file)[_BASE]) if file.is_file() else None
