"""Waiting without polling: claimers wait for work, algorithms wait for rollouts to finish.

A waiter registers first and looks at the database second, so nothing that is committed in between is missed. Waiters
may live on any event loop; the notifier is called from the writer's thread after a commit.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from types import TracebackType


class Waiter:
    """One wait on one event loop. A context manager: leaving it unregisters."""

    def __init__(self, notifier: Notifier, rollout_ids: Iterable[str] | None, any_of: bool, run_id: str | None = None):
        self._notifier = notifier
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.any_of = any_of
        self.pending: set[str] | None = None if rollout_ids is None else set(rollout_ids)
        """The rollouts that are not known to be finished; None for a claimer."""
        self.run_id = run_id
        """Of a claimer: the run it works for; None: for all."""
        self.called = False
        self.called_for: str | None = None
        """The run whose rollout a claimer was called for last."""

    def may_claim(self, run_id: str | None) -> bool:
        """Whether a claimer takes rollouts of this run; those of no run (None) are anybody's."""
        return self.run_id is None or run_id is None or self.run_id == run_id

    def call(self) -> None:
        """From any thread."""
        self.called = True
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            return  # its loop is closed: nobody waits any more

    async def wait(self, timeout: float | None) -> bool:
        """True when called, False after `timeout` seconds. May be waited for again."""
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        self.called = False
        return True

    def __enter__(self) -> Waiter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._notifier.leave(self)


class Notifier:
    """Who waits for what."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claimers: OrderedDict[Waiter, None] = OrderedDict()
        self._watchers: dict[str, set[Waiter]] = {}

    def claimer(self, run_id: str | None = None) -> Waiter:
        """A waiter that is called when there may be something to claim, for the runners of a run or for all."""
        waiter = Waiter(self, None, any_of=True, run_id=run_id)
        with self._lock:
            self._claimers[waiter] = None
        return waiter

    def watcher(self, rollout_ids: Sequence[str], *, any_of: bool) -> Waiter:
        """A waiter that is called when one (`any_of`) or all of the rollouts are finished."""
        waiter = Waiter(self, rollout_ids, any_of)
        with self._lock:
            for rollout_id in rollout_ids:
                self._watchers.setdefault(rollout_id, set()).add(waiter)
        return waiter

    def again(self, waiter: Waiter) -> None:
        """Put a claimer that found nothing back at the end of the line."""
        with self._lock:
            self._claimers[waiter] = None

    def forget(self, waiter: Waiter, rollout_ids: Iterable[str]) -> None:
        """These were finished before the watcher looked; if they were the last ones, it is called."""
        assert waiter.pending is not None
        with self._lock:
            for rollout_id in rollout_ids:
                self._drop(waiter, rollout_id)
                waiter.pending.discard(rollout_id)
        if not waiter.pending:
            waiter.call()

    def _drop(self, waiter: Waiter, rollout_id: str) -> None:
        watchers = self._watchers.get(rollout_id)
        if watchers is not None:
            watchers.discard(waiter)
            if not watchers:
                del self._watchers[rollout_id]

    def leave(self, waiter: Waiter) -> None:
        with self._lock:
            self._claimers.pop(waiter, None)
            for rollout_id in waiter.pending or ():
                self._drop(waiter, rollout_id)
        if waiter.called and waiter.pending is None:
            # It was called for work that it did not take; somebody else should.
            self.queued(1, waiter.called_for)

    def queued(self, count: int, run_id: str | None = None) -> None:
        """`count` rollouts of a run became claimable: call that many of its claimers, the longest waiting first."""
        with self._lock:
            chosen = list(itertools.islice((w for w in self._claimers if w.may_claim(run_id)), max(count, 0)))
            for waiter in chosen:
                del self._claimers[waiter]
        for waiter in chosen:
            waiter.called_for = run_id
            waiter.call()

    def everybody(self) -> None:
        """News may have been missed: let all who wait look again."""
        with self._lock:
            waiters = {*self._claimers, *(waiter for group in self._watchers.values() for waiter in group)}
        for waiter in waiters:
            waiter.call()

    def finished(self, rollout_ids: Iterable[str]) -> None:
        """These rollouts reached a final status."""
        called: list[Waiter] = []
        with self._lock:
            for rollout_id in rollout_ids:
                for waiter in self._watchers.pop(rollout_id, ()):
                    assert waiter.pending is not None
                    waiter.pending.discard(rollout_id)
                    if waiter.any_of or not waiter.pending:
                        called.append(waiter)
        for waiter in called:
            waiter.call()
