"""Runners as asynchronous Ray actors on the machines of a cluster, each with many rollouts at once.

They are runners elsewhere like any other: they reach the store's server and the gateway over HTTP. Here is only how
they get there, and that one that ends is named and started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentlightning.backend.ray.cluster import Need, Placement, of_run, reserve, this_machine
from agentlightning.backend.ray.elastic import LOOK_SECONDS, Look, seen_every
from agentlightning.backend.ray.options import RayOptions
from agentlightning.errors import AgentLightningError, StoreError, message_of, message_of_ray
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.runner.sending import Sent
from agentlightning.store import LightningStoreClient
from agentlightning.tracer import Tracer
from agentlightning.types import Hook
from agentlightning.types.finding import counted

logger = logging.getLogger(__name__)

_LIVED_SECONDS = 30.0
"""A runner that ran for so long before it ended did not die of its start."""
_PAUSE_SECONDS = 1.0
_AT_ONCE = 8
"""Calls of the actor, of which one lasts; its rollouts are counted by `concurrency`."""


@dataclass(frozen=True, slots=True)
class RunnerWork:
    """What a runner is given."""

    agent: Sent
    hooks: Sequence[Hook]
    tracer: Tracer
    concurrency: int
    max_rollouts: int | None


class RunnerActor:
    """In the actor's process."""

    def __init__(self, name: str, level: int, path: Sequence[str]) -> None:
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s", force=True)
        sys.path += [place for place in path if place not in sys.path]  # behind this machine's own places
        self._name = name
        self._stop = asyncio.Event()

    def __repr__(self) -> str:
        return self._name

    async def where(self) -> str:
        return f"{self._name} (process {os.getpid()} on {this_machine()})"

    async def leave(self) -> None:
        """Claim no more; what it runs is finished, and `run` returns."""
        self._stop.set()

    async def run(self, work: RunnerWork, address: Address, worker_id: str) -> None:
        """Claim and run rollouts until it has done its `max_rollouts` or is to leave."""
        await serve_rollouts(
            work.agent.agent(),
            address,
            stop=self._stop,
            hooks=work.hooks,
            tracer=work.tracer,
            concurrency=work.concurrency,
            max_rollouts=work.max_rollouts,
            worker_id=worker_id,
        )


class RunnerActors:
    """`start` when the store is served, `watch` beside the algorithm; `pause` before the store goes; then `stop`."""

    def __init__(self, count: int, work: RunnerWork, options: RayOptions, run: str | None = None) -> None:
        """`run` is what Ray's pages call the run."""
        self._count = count
        self._run = run
        self._work = work
        self._options = options
        self._task: asyncio.Task[None] | None = None
        self._actors: dict[int, Any] = {}
        """By number."""
        self._stays = [asyncio.Event() for _ in range(count)]
        """Of each runner, set while its machine is not draining."""

    def start(self, address: Address) -> None:
        """Place the runners; they begin to claim."""
        self._task = asyncio.create_task(self._keep_all(address))

    async def pause(self) -> None:
        """End them; another `start` may follow."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def watch(self) -> None:
        """Returns when all have done their `max_rollouts`. Raises AgentLightningError when one keeps dying, ConfigError
        when there is no room for them."""
        if self._task is not None:
            await self._task

    async def stop(self) -> None:
        """End them all. Idempotent."""
        await self.pause()

    async def _keep_all(self, address: Address) -> None:
        need = Need("runner", self._count, {"CPU": self._options.cpus_per_runner})
        placement = await reserve([need], self._options, "SPREAD", self._run)
        try:
            async with (
                placement.watched(),
                seen_every(LOOK_SECONDS, partial(self._end_moved, placement)),
                asyncio.TaskGroup() as keeping,
            ):
                for number in range(self._count):
                    keeping.create_task(self._keep(placement, number, address))
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
        finally:
            await placement.give_back()

    async def _end_moved(self, placement: Placement, seen: Look) -> None:
        """Have those leave whose machine is draining, unless no runner would be left."""
        machines = [seen.machine_of(placement, number) for number in range(self._count)]
        some_stay = any(machine is not None and machine not in seen.draining for machine in machines)
        for number, (machine, stays) in enumerate(zip(machines, self._stays, strict=True)):
            if machine is not None and machine not in seen.draining:
                stays.set()
            elif machine is not None and some_stay and stays.is_set():
                stays.clear()
                logger.warning("The machine of runner %d is draining: it claims no more and is started again.", number)
                if number in self._actors:
                    self._actors[number].leave.remote()

    async def _keep(self, placement: Placement, number: int, address: Address) -> None:
        """One runner, started again when it dies, or has left its machine."""
        from ray.exceptions import RayActorError, RayTaskError  # pyright: ignore[reportMissingImports]

        deaths, loop, stays = 0, asyncio.get_running_loop(), self._stays[number]
        stays.set()
        while await stays.wait():
            name, began = of_run(f"runner {number}", self._run), loop.time()
            worker_id = f"runner-{number}-{secrets.token_hex(4)}"
            level = logging.getLogger().getEffectiveLevel()
            actor = placement.place(RunnerActor, number, name, level, list(sys.path), at_once=_AT_ONCE)
            self._actors[number] = actor
            try:
                name = await actor.where.remote()
                await actor.run.remote(self._work, address, worker_id)
                if stays.is_set():
                    return
            except RayTaskError as error:
                raise AgentLightningError(f"{name} failed: {message_of(error.cause)}") from error
            except RayActorError as error:
                deaths = 1 if loop.time() - began > _LIVED_SECONDS else deaths + 1
                if deaths > self._options.restarts:
                    raise AgentLightningError(
                        f"{name} ended {deaths} times soon after its start, last: {message_of_ray(error)}"
                    ) from error
                back = await _given_back(address, worker_id, f"{name} ended.")
                logger.warning("%s ended: %s It is started again; %s", name, message_of_ray(error), back)
                await asyncio.sleep(_PAUSE_SECONDS)
            finally:
                _end(actor)


async def _given_back(address: Address, worker_id: str, error: str) -> str:
    """What becomes of what a runner had claimed that is gone, in words."""
    store = LightningStoreClient(address.url, key=address.key)
    try:
        released = await store.release_worker(worker_id, error)
        return f"its {counted(released, 'rollout is', 'rollouts are')} handed out again."
    except StoreError as failed:
        return f"its rollouts are handed out again when their leases run out ({failed})."
    finally:
        await store.close()


def _end(actor: Any) -> None:
    import ray  # pyright: ignore[reportMissingImports]

    if ray.is_initialized():
        ray.kill(actor)
