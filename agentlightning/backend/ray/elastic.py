"""Engines that come and go while a run goes on: added where the cluster has room, withdrawn from machines that leave;
and a learner that is placed again before its machine is gone.

Ray says which machines are draining (its autoscaler, a cloud's notice of preemption or a person told them to go), what
is free, and whether somebody waits for resources. An engine on a machine that drains gets no new request and finishes
what it samples. What the machine's end cuts off all the same is sampled again by another engine. A rank cannot leave
alone: the loop ends its step, saves it, and the run starts again from there.
"""

# Where Ray is not installed, pyright takes the folder of this file for it.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Generic, NoReturn

from agentlightning.backend.base import Drain
from agentlightning.backend.fleet import Fleet, Replica
from agentlightning.backend.ray.cluster import Need, Placement, Resources, fits_on

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""How often the cluster is looked at."""
_PLACE_SECONDS = 10.0
"""How long an engine that is added may wait for the place that was free."""
_PLACED = "CREATED"


@dataclass(frozen=True, slots=True)
class Look:
    """A cluster as it is just now."""

    draining: Collection[str]
    """Machines that were told to go, by Ray's id."""
    free: Mapping[str, Resources]
    """What is free on each machine that stays."""
    groups: Mapping[str, Mapping[str, Any]]
    """Ray's placement groups of everybody, by id."""

    @property
    def waited_for(self) -> bool:
        """Whether anybody waits for resources."""
        return any(group["state"] not in (_PLACED, "REMOVED") for group in self.groups.values())

    def machine_of(self, placement: Placement, bundle: int) -> str | None:
        """Where a bundle is; None while it is on no machine."""
        group = self.groups.get(placement.group.id.hex())
        return None if group is None or group["state"] != _PLACED else group["bundles_to_node_id"].get(bundle)

    def fit_without(self, placements: Iterable[Placement], needs: Sequence[Need]) -> bool:
        """Whether the needs fit on the machines that stay, once what these placements hold there is given back."""
        there = {node: dict(what) for node, what in self.free.items()}
        for placement in placements:
            for number, bundle in enumerate(placement.group.bundle_specs):
                machine = there.get(self.machine_of(placement, number) or "", {})
                for name, amount in bundle.items():
                    machine[name] = machine.get(name, 0.0) + amount
        return fits_on(needs, list(there.values()))


def look() -> Look:
    """Ask Ray."""
    from ray._private.state import available_resources_per_node, state  # pyright: ignore[reportMissingImports]
    from ray.util import placement_group_table  # pyright: ignore[reportMissingImports]

    draining = frozenset(state.get_draining_nodes())
    free = {node: dict(what) for node, what in available_resources_per_node().items() if node not in draining}
    return Look(draining, free, placement_group_table())


@asynccontextmanager
async def seen_every(seconds: float, follow: Callable[[Look], Awaitable[None]]) -> AsyncIterator[None]:
    """Within the block the cluster is looked at every so many seconds, and `follow` does what follows from it."""

    async def run() -> NoReturn:
        while True:
            await asyncio.sleep(seconds)
            try:
                await follow(await asyncio.to_thread(look))
            except Exception as error:  # Ray cannot say how the cluster is, or it changes: the next look may be better
                logger.debug("The cluster cannot be looked at: %s", error, exc_info=True)

    following = asyncio.create_task(run())
    try:
        yield
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class LearnerPlaces:
    """Where the learner's processes are, and what is known of these machines' end (`drain`)."""

    def __init__(self, placement: Placement, names: Sequence[str], needs: Sequence[Need]) -> None:
        """`names` are those of the first bundles; `needs` is all that the run's backend has to have."""
        self._placement = placement
        self._names = names
        self._needs = needs
        self.drain: Drain | None = None

    def follow(self, seen: Look, added: Collection[Placement]) -> None:
        """`added`: places that this run took later and would give back."""
        machines = [seen.machine_of(self._placement, bundle) for bundle in range(len(self._names))]
        leaving = [name for name, machine in zip(self._names, machines, strict=True) if machine in seen.draining]
        if not leaving:
            self.drain = None
            return
        fits = seen.fit_without([self._placement, *added], self._needs)
        machine = "The machine of {} is draining." if len(leaving) == 1 else "The machines of {} are draining."
        message = machine.format(" and ".join(leaving))
        if self.drain is None or fits != self.drain.can_move:
            then = "starts again on other machines after this step" if fits else "saves each step until there is room"
            logger.warning("%s The run %s.", message, then)
        self.drain = Drain(message, fits)


class Elastic(Generic[Replica]):
    """`running` while the run goes on; `give_back` when the engines are closed."""

    def __init__(
        self,
        fleet: Fleet[Replica],
        make: Callable[[int], Replica],
        place_of: Callable[[Replica], tuple[Placement, int]],
        learner: LearnerPlaces,
        need: Need | None,
        sampled: Callable[[], int],
    ) -> None:
        """`make` makes the engine with a number, and `place_of` says where one is that was there from the start. `need`
        is that of one engine more; None: none is added. None is added either before a request was sampled: runners have
        their places by then."""
        self._fleet = fleet
        self._make = make
        self._place_of = place_of
        self._learner = learner
        self._need = need
        self._sampled = sampled
        self._numbers = itertools.count(len(fleet.replicas))
        self.places: dict[str, Placement] = {}
        """By name, of engines that were added."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Within the block engines come and go, and the learner knows of machines that leave."""
        async with seen_every(LOOK_SECONDS, self._follow):
            yield

    async def give_back(self) -> None:
        """All places of engines that were added."""
        for name in list(self.places):
            await self.places.pop(name).give_back()

    async def _follow(self, seen: Look) -> None:
        self._learner.follow(seen, self.places.values())
        for replica in list(self._fleet.replicas):
            added = self.places.get(replica.name)
            machine = seen.machine_of(*((added, 0) if added is not None else self._place_of(replica)))
            self._withdraw(replica, leaves=machine in seen.draining)
            if added is None:
                continue
            if self._fleet.has_given_up(replica):
                logger.warning("No further engines are added: %s could not be kept alive.", replica.name)
                self._need = None
            elif machine is not None and not (machine in seen.draining and not replica.running):
                continue
            await self._remove(replica)
        if self._need is not None and self._sampled() and not seen.waited_for:
            await self._add(self._need, seen)

    def _withdraw(self, replica: Replica, *, leaves: bool) -> None:
        """Let it have no new requests while its machine is draining."""
        if leaves and replica not in self._fleet.leaving:
            logger.warning("The machine of %s is draining: it gets no new requests.", replica.name)
            self._fleet.leaving.add(replica)
        elif not leaves:
            self._fleet.leaving.discard(replica)

    async def _remove(self, replica: Replica) -> None:
        await self._fleet.remove(replica)
        await self.places.pop(replica.name).give_back()
        logger.warning("%s has left; %d remain.", replica.name, len(self._fleet.replicas))

    async def _add(self, need: Need, seen: Look) -> None:
        """One engine, if there is room for it. Nothing is asked of the cluster that is not there, so that nothing grows
        for it."""
        if not fits_on([need], list(seen.free.values())):
            return
        placement = await Placement.of(need.bundles(), "PACK", _PLACE_SECONDS)
        if placement is None:
            return
        replica = self._make(next(self._numbers))
        self.places[replica.name] = placement
        self._fleet.add(replica)
        logger.warning("%s is added; %d are there.", replica.name, len(self._fleet.replicas))
