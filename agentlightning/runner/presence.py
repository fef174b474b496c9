"""What a runner and the store tell each other while agents run: that it is alive, and which rollouts were ended.

An attempt is watched while its agent runs. When its rollout is ended by somebody else (cancelled, say), the agent's
deadline is moved to now, so it is stopped in the same way as one whose time is over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from agentlightning.errors import StoreError
from agentlightning.store.base import LightningStore
from agentlightning.types import AttemptedRollout

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 10.0
WATCH_SECONDS = 5.0
"""How long one question waits in the store for rollouts that end; those that began meanwhile are in the next one."""
PAUSE_SECONDS = 1.0
"""Between two questions. One that is answered sooner takes its whole time all the same: most rollouts that end were
ended by this runner."""


class RunningAttempt:
    """One attempt whose agent is running."""

    def __init__(self, rollout_id: str, deadline: asyncio.Timeout) -> None:
        self.rollout_id = rollout_id
        self.ended: str | None = None
        """The status that somebody else gave its rollout."""
        self._deadline = deadline

    def end(self, status: str) -> None:
        self.ended = self.ended or status
        if not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class Presence:
    """Belongs to one runner."""

    def __init__(self) -> None:
        self._beat_seconds = HEARTBEAT_SECONDS
        self._sooner = asyncio.Event()
        """Set when a claimed rollout has a shorter lease than those before it."""
        self._watched: set[RunningAttempt] = set()
        self._held: set[str] = set()

    def respect(self, claimed: AttemptedRollout) -> None:
        """Beat often enough for the lease of this rollout."""
        lease = claimed.config.unresponsive_seconds
        if lease is not None and lease / 3 < self._beat_seconds:
            self._beat_seconds = lease / 3
            self._sooner.set()

    @contextmanager
    def holding(self, attempt_id: str) -> Iterator[None]:
        """Keep an attempt alive until it is finished in the store."""
        self._held.add(attempt_id)
        try:
            yield
        finally:
            self._held.discard(attempt_id)

    @contextmanager
    def watching(self, rollout_id: str, deadline: asyncio.Timeout) -> Iterator[RunningAttempt]:
        """Watch an attempt; call it inside of the deadline."""
        watched = RunningAttempt(rollout_id, deadline)
        self._watched.add(watched)
        try:
            yield watched
        finally:
            self._watched.discard(watched)

    @asynccontextmanager
    async def shown(self, store: LightningStore, worker_id: str) -> AsyncIterator[None]:
        """Beat and watch until the context ends."""
        tasks = [asyncio.create_task(self._beat(store, worker_id)), asyncio.create_task(self._watch(store))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _beat(self, store: LightningStore, worker_id: str) -> None:
        while True:
            try:
                # By name: a claim whose answer was lost is nobody's, and its lease must run out.
                await store.update_worker(worker_id, attempt_ids=sorted(self._held))
            except StoreError as error:
                logger.warning("A heartbeat failed: %s", error)
            self._sooner.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._sooner.wait(), self._beat_seconds)

    async def _watch(self, store: LightningStore) -> None:
        pause = PAUSE_SECONDS
        while True:
            await asyncio.sleep(pause)
            ids = sorted({watched.rollout_id for watched in self._watched})
            began, pause = time.monotonic(), PAUSE_SECONDS
            try:
                ended = await store.wait_for_any_rollout(rollout_ids=ids, timeout=WATCH_SECONDS)
            except StoreError as error:
                logger.debug("The runner does not hear of rollouts that are cancelled: %s", error)
                continue
            if ended:
                pause = max(PAUSE_SECONDS, WATCH_SECONDS - (time.monotonic() - began))
            statuses = {rollout.rollout_id: rollout.status for rollout in ended}
            for watched in [w for w in self._watched if w.rollout_id in statuses]:
                watched.end(statuses[watched.rollout_id])
