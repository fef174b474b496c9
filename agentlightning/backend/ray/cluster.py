"""The cluster, connected to or started on this machine: what has room on it, the processes placed there, and the words
for what does not fit.
"""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from agentlightning.backend.ray.options import Layout, RayOptions
from agentlightning.errors import ConfigError, EngineError, missing_extra

logger = logging.getLogger(__name__)

LOCAL = "local"
LOOPBACK = "127.0.0.1"

_LOOK_SECONDS = 2.0
"""How often it is seen whether all that was reserved is on a machine."""
_SAY_SECONDS = 5.0
"""How long a wait is silent; then it is reported, each time after twice as long, at least every …"""
_SAY_AT_LEAST_SECONDS = 60.0

_DUMPS = r"\[state-dump\]|lines of the Raylet logs|\((raylet|gcs_server)\) \w+\.cc:"
"""What Ray's own processes write for those who look after them, and forward to the terminal; it is in their logs."""

_lock = threading.Lock()
_users = 0
"""Of the connection that was made here: runs side by side in this process share it, and the last one ends it."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """One that this process is connected to."""

    host: str
    """This machine's address, as the others reach it; loopback where there are none."""

    @property
    def has_gpus(self) -> bool:
        return any(machine.get("GPU", 0) for machine in _machines())


@dataclass(frozen=True, slots=True)
class Placement:
    """Room that was reserved: a bundle for each process, in the order of the needs."""

    group: Any

    @classmethod
    async def of(cls, bundles: Sequence[dict[str, float]], how: Layout, seconds: float) -> Placement | None:
        """Room for all of them within so many seconds; None where there is none."""
        from ray.util import placement_group  # pyright: ignore[reportMissingImports]

        placement = cls(await asyncio.to_thread(placement_group, list(bundles), strategy=how))
        found = False
        try:
            found = await asyncio.to_thread(placement.group.wait, seconds)
        finally:
            if not found:
                await placement.give_back()
        return placement if found else None

    def place(self, kind: type, bundle: int, *arguments: Any, at_once: int = 4, unreserved: bool = False) -> Any:
        """An actor of this kind in a bundle, with so many calls at once; Ray starts it when there is room again. One
        that is `unreserved` takes nothing of what is reserved."""
        import ray  # pyright: ignore[reportMissingImports]
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # pyright: ignore[reportMissingImports]

        resources = {} if unreserved else self.group.bundle_specs[bundle]
        return (
            ray.remote(kind)
            .options(
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                max_concurrency=at_once,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle),
            )
            .remote(*arguments)
        )

    async def machines(self) -> dict[int, str]:
        """The machine that each bundle is on."""
        from ray.util import placement_group_table  # pyright: ignore[reportMissingImports]

        table = await asyncio.to_thread(placement_group_table, self.group)
        return dict(table["bundles_to_node_id"])

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Within the block, report what the run waits for when machines are lacking: at first, or after one died."""
        saying = asyncio.create_task(self._say_what_is_lacking())
        try:
            yield
        finally:
            saying.cancel()
            await asyncio.gather(saying, return_exceptions=True)

    async def _say_what_is_lacking(self) -> None:
        loop = asyncio.get_running_loop()
        since, reported = loop.time(), 0.0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            needed = await asyncio.to_thread(_lacking, self.group)
            if not needed:
                since, reported = loop.time(), 0.0
            elif (waited := loop.time() - since) >= max(
                _SAY_SECONDS, min(2 * reported, reported + _SAY_AT_LEAST_SECONDS)
            ):
                reported = waited
                logger.warning("%s", waiting(needed, _free(), waited))

    async def give_back(self) -> None:
        """End what is in it. Idempotent."""
        from ray.util import remove_placement_group  # pyright: ignore[reportMissingImports]

        with suppress(Exception):  # the cluster may be gone
            await asyncio.to_thread(remove_placement_group, self.group)


def of_run(name: str, run: str | None) -> str:
    """What Ray's pages and logs call one of a run's actors, so that runs on one cluster can be distinguished."""
    return f"{name} of {run}" if run else name


async def reserve(needs: Sequence[Need], options: RayOptions, how: Layout, run: str | None = None) -> Placement:
    """Room for all of it at once, by the run's name and a suffix, as no two may have one name. Raises ConfigError that
    says what is needed and what is there."""
    from ray.util import placement_group, remove_placement_group  # pyright: ignore[reportMissingImports]

    bundles = [bundle for need in needs for bundle in need.bundles()]
    if not fits_on(needs, _machines(), apart=how == "STRICT_SPREAD"):
        hint = f"Waiting {options.wait_seconds:g} s for it to grow."
        logger.warning("%s", too_small(needs, _machines(), _free(), hint=hint))
    named = f"{run}-{secrets.token_hex(4)}" if run else ""
    group = await asyncio.to_thread(placement_group, bundles, strategy=how, name=named)
    placement = Placement(group)
    async with placement.watched():
        if await asyncio.to_thread(group.wait, options.wait_seconds):
            return placement
    hint = "Add machines, lower ranks, engines, cpus_per_… or gpus_per_…, or wait longer (wait_seconds)."
    words = too_small(needs, _machines(), _free(), hint=hint)
    await asyncio.to_thread(remove_placement_group, group)
    raise ConfigError(words)


def require_ray() -> None:
    """Raises ConfigError with what to install where Ray is not."""
    try:
        import ray  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise missing_extra("ray", error.name or "ray") from None


@asynccontextmanager
async def connected(options: RayOptions, *, cpus: float) -> AsyncIterator[Cluster]:
    """The cluster that the options name, or one of this machine that has so many CPUs to count; one that this process
    is connected to already is taken as it is. Raises ConfigError without Ray, EngineError where there is no cluster."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", _DUMPS)  # read when Ray is imported
    require_ray()
    address = options.address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address.startswith("ray://"):
        raise ConfigError(
            f"The trainer cannot use {address}: engines, learner and runners talk to it, so it must run on a machine "
            "of the cluster. Start it there with address='auto', for example with `ray job submit`."
        )
    try:
        ours = await asyncio.to_thread(_join, address, options, cpus)
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"There is no Ray cluster at '{address}': {error}") from error
    try:
        yield Cluster(LOOPBACK if address == LOCAL and len(_machines()) == 1 else this_machine())
    finally:
        if ours:
            await asyncio.to_thread(_leave)


def _join(address: str, options: RayOptions, cpus: float) -> bool:
    """Connect, unless this process is connected; whether it is by a connection of ours."""
    global _users
    import ray  # pyright: ignore[reportMissingImports]

    with _lock:
        if ray.is_initialized() and not _users:
            return False
        if not _users:
            _connect(address, options, cpus)
        _users += 1
        return True


def _leave() -> None:
    global _users
    import ray  # pyright: ignore[reportMissingImports]

    with _lock:
        _users -= 1
        if not _users:
            ray.shutdown()


def _connect(address: str, options: RayOptions, cpus: float) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    here: dict[str, Any] = {}
    if address == LOCAL:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
        here = {
            "num_cpus": max(os.cpu_count() or 1, int(cpus + 0.999)),
            "include_dashboard": False,
            "object_store_memory": options.object_store_memory,
        }
    ray.init(
        address=address,
        runtime_env=options.runtime_env or None,
        namespace="agentlightning",
        logging_level=logging.ERROR,
        **here,
    )


def this_machine() -> str:
    """The address under which the cluster knows the machine that this process runs on."""
    import ray  # pyright: ignore[reportMissingImports]

    here = ray.get_runtime_context().get_node_id()
    return next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == here)


def _lacking(group: Any) -> dict[str, float]:
    import ray  # pyright: ignore[reportMissingImports]
    from ray.util import placement_group_table  # pyright: ignore[reportMissingImports]

    table = placement_group_table(group)
    if table["state"] == "CREATED":
        return {}
    alive = {str(node["NodeID"]) for node in ray.nodes() if node["Alive"]}
    return lacking(group.bundle_specs, dict(table["bundles_to_node_id"]), alive)


def _machines() -> list[dict[str, float]]:
    import ray  # pyright: ignore[reportMissingImports]

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def _free() -> dict[str, float]:
    import ray  # pyright: ignore[reportMissingImports]

    return dict(ray.available_resources())


Resources = Mapping[str, float]
"""By Ray's names: CPU, GPU."""


@dataclass(frozen=True, slots=True)
class Need:
    """How many processes of a kind a run needs, and the resources of each."""

    what: str
    count: int
    each: Resources

    def bundles(self) -> list[dict[str, float]]:
        """A bundle of resources for each, as Ray reserves them. One that needs nothing asks for a bit of a CPU."""
        each = {name: amount for name, amount in self.each.items() if amount} or {"CPU": 0.001}
        return [dict(each) for _ in range(self.count)]

    def __str__(self) -> str:
        return f"{self.count} × {self.what} with {_amounts(self.each)}"


def fits_on(needs: Sequence[Need], machines: Sequence[Resources], *, apart: bool = False) -> bool:
    """Whether all find a place, the largest first, on the first machine with room; `apart`: each on one of its own."""
    left = [dict(machine) for machine in machines]
    bundles = [bundle for need in needs for bundle in need.bundles()]
    for bundle in sorted(bundles, key=lambda b: (-b.get("GPU", 0.0), -b.get("CPU", 0.0))):
        fits = (m for m in left if all(m.get(name, 0.0) + 1e-9 >= amount for name, amount in bundle.items()))
        machine = next(fits, None)
        if machine is None:
            return False
        for name, amount in bundle.items():
            machine[name] -= amount
        if apart:
            left.remove(machine)
    return True


def on_other_machines(one: int, bundles: Sequence[int], machines: Mapping[int, str]) -> list[int]:
    """Of `bundles`, the first on each machine other than that of bundle `one`; `machines`: where each bundle is."""
    found = {machines[bundle]: bundle for bundle in reversed(bundles) if machines[bundle] != machines[one]}
    return sorted(found.values())


def too_small(needs: Sequence[Need], machines: Sequence[Resources], free: Resources, *, hint: str) -> str:
    """What is needed, what is there, and what to do."""
    needed = " and ".join(str(need) for need in needs)
    there = "; ".join(_amounts(machine) for machine in machines) or "none"
    count = f"{len(machines)} machine{'s' * (len(machines) != 1)}"
    return (
        f"The Ray cluster has no room for this run. It needs {needed}. "
        f"There: {count} ({there}), of which {_amounts(free)} are free. {hint}"
    )


def _amounts(resources: Resources) -> str:
    """CPUs and GPUs in words."""
    return ", ".join(f"{resources.get(n, 0.0):g} {n}" for n in ("CPU", "GPU") if n == "CPU" or resources.get(n)) or "0"


def lacking(bundles: Sequence[Resources], machines: Mapping[int, str], alive: Collection[str]) -> dict[str, float]:
    """The resources of all bundles whose machine is not alive, added up; `machines`: where each bundle is."""
    homeless = [bundle for number, bundle in enumerate(bundles) if machines.get(number, "") not in alive]
    names = sorted({name for bundle in homeless for name in bundle})
    return {name: sum(bundle.get(name, 0.0) for bundle in homeless) for name in names}


def waiting(needed: Resources, free: Resources, seconds: float) -> str:
    """What a run waits for, in words."""
    parts = [f"{_counted(n, needed[n])}, {free.get(n, 0.0):g} available" for n in ("CPU", "GPU") if needed.get(n)]
    return f"Waiting for resources: needs {'; '.join(parts) or 'a machine'}, since {seconds:.0f} s."


def _counted(name: str, amount: float) -> str:
    return f"{amount:g} {name}{'s' * (amount != 1)}"
