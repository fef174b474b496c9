"""Operations on their way to a database thread, and their results on the way back to the event loops.

What keeps attempts alive goes first, then claims, then the rest; half of a batch is left to those that came later in
this order, so that nothing waits for ever.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from enum import IntEnum
from typing import Any, Protocol, TypeVar

from agentlightning.errors import StoreClosedError, StoreUnavailableError
from agentlightning.store.database.transaction import Transaction, TransactionOperation

logger = logging.getLogger(__name__)
T = TypeVar("T")

REPEAT_SECONDS = 60.0
ROUNDS = 20
"""Of an event loop, in which a request that has arrived becomes an operation."""
_NEVER = float("inf")


class Complaints:
    """What the watchdog says about its failures: each new one, a fault of ours with its traceback, the same
    again once a minute."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._reported = 0.0

    def about(self, error: BaseException) -> None:
        if str(error) != self._last:
            fault = None if isinstance(error, StoreUnavailableError) else error  # of a full disk its name is enough
            logger.error("The store's watchdog failed; it keeps trying. %s", error, exc_info=fault)
        elif time.monotonic() - self._reported > REPEAT_SECONDS:
            logger.error("The store's watchdog still fails: %s", error)
        else:
            return
        self._last, self._reported = str(error), time.monotonic()


class JobTurn(IntEnum):
    """Which operations go before others."""

    ALIVE = 0
    """They keep attempts alive."""
    CLAIM = 1
    OTHER = 2


class Job:
    """One operation and the future its caller waits for."""

    __slots__ = ("error", "future", "loop", "operation", "result", "rollout_ids", "since", "turn", "undo")

    def __init__(
        self,
        operation: TransactionOperation[Any],
        undo: Callable[[Any], None] | None,
        future: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
        rollout_ids: Collection[str] = (),
        turn: JobTurn = JobTurn.OTHER,
    ):
        self.operation = operation
        self.rollout_ids = rollout_ids
        """Those that exist and that the operation may change, as far as they are known before."""
        self.undo = undo
        """Called on the event loop with the result if the caller was cancelled before it could be delivered."""
        self.future = future
        self.loop = loop
        self.turn = turn
        self.since = time.monotonic()
        self.result: Any = None
        self.error: BaseException | None = None


class Watch(Protocol):
    """The watchdog: an operation that takes the age of the oldest job that is not stored."""

    def __call__(self, tx: Transaction, /, lag: float) -> None: ...


class Tick(Job):
    """A job of the database's own: nobody waits for it."""

    __slots__ = ()

    def __init__(self, operation: TransactionOperation[None]):
        self.operation = operation
        self.rollout_ids = ()
        self.result = None
        self.error = None


def _weight(job: Job) -> int:
    return max(1, len(job.rollout_ids))


class Loops:
    """The event loops that operations come from, which may be behind with what clients have sent."""

    def __init__(self) -> None:
        self._pending: dict[asyncio.AbstractEventLoop, float | None] = {}
        """When each was asked whether it comes round; None: it has said so."""

    def see(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pending.setdefault(loop, None)

    def ask(self) -> None:
        for loop, since in list(self._pending.items()):
            if since is None and loop.is_running():
                self._pending[loop] = time.monotonic()
                try:
                    loop.call_soon_threadsafe(self._come_round, loop, ROUNDS)
                except RuntimeError:
                    self._pending.pop(loop)  # it was closed

    def _come_round(self, loop: asyncio.AbstractEventLoop, rounds: int) -> None:
        if rounds:
            loop.call_soon(self._come_round, loop, rounds - 1)
        else:
            self._pending[loop] = None

    def waiting_since(self) -> float:
        """When the first of those was asked that have not come round; infinity if all have."""
        waiting = [since for loop, since in list(self._pending.items()) if since is not None and loop.is_running()]
        return min(waiting, default=_NEVER)


class JobQueue:
    """Operations that one or more threads take in batches."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lanes = tuple(deque[Job]() for _ in JobTurn)
        self._working: dict[int, float] = {}
        """Since when the oldest job of each thread's batch has waited."""
        self._ended = False
        self.loops = Loops()

    def put(self, job: Job) -> None:
        self.loops.see(job.loop)
        with self._changed:
            self._lanes[job.turn].append(job)
            self._changed.notify()

    def end(self) -> None:
        """The threads end when the queue is empty."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def take(self, wait: float, most: int) -> tuple[list[Job], bool]:
        """What this thread does next, after waiting up to `wait` seconds for the first job; False with the last batch
        of all. Call `done` after it. `most`: operations, where one counts as often as rollouts that it changes."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or any(self._lanes), None if wait == _NEVER else max(wait, 0.0))
            batch: list[Job] = []
            for turn, lane in zip(JobTurn, self._lanes, strict=True):
                capacity = most - sum(map(_weight, batch))
                if any(self._lanes[turn + 1 :]):
                    capacity = -(-capacity // 2)
                while lane and capacity > 0:
                    batch.append(lane.popleft())
                    capacity -= _weight(batch[-1])
            if batch:
                self._working[threading.get_ident()] = min(job.since for job in batch)
            return batch, not self._ended or any(self._lanes)

    def done(self) -> None:
        """What this thread took is done."""
        with self._changed:
            self._working.pop(threading.get_ident(), None)

    def next(self) -> Job | None:
        """The next job, once there is one; None when there will be none any more."""
        batch, open_ = self.take(_NEVER, 1)
        while not batch and open_:
            batch, open_ = self.take(_NEVER, 1)
        return batch[0] if batch else None

    def waiting_since(self) -> float:
        """When the oldest job came that is not done; infinity if all are."""
        with self._changed:
            waiting = [*(lane[0].since for lane in self._lanes if lane), *self._working.values()]
        return min([*waiting, self.loops.waiting_since()])

    def refuse(self) -> None:
        """Fail what is still queued on a database that has been closed."""
        left = [job for lane in self._lanes for job in lane]
        for job in left:
            job.error = closed_error()
        deliver(left)


def lag_of(*queues: JobQueue) -> float:
    """How many seconds ago the oldest job came that is not done: what came before is stored."""
    return max(0.0, time.monotonic() - min(queue.waiting_since() for queue in queues))


def submit(
    queue: JobQueue,
    operation: TransactionOperation[T],
    undo: Callable[[T], None] | None = None,
    rollout_ids: Collection[str] = (),
    turn: JobTurn = JobTurn.OTHER,
) -> asyncio.Future[T]:
    """Hand an operation to a database thread, from any event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    queue.put(Job(operation, undo, future, loop, rollout_ids, turn))
    return future


def deliver(jobs: Iterable[Job]) -> None:
    """Give the results back, with one wake-up per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Job]] = {}
    for job in jobs:
        by_loop.setdefault(job.loop, []).append(job)
    for loop, done in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, done)
        except RuntimeError:
            continue  # its loop is closed: nobody waits any more


def _resolve(jobs: list[Job]) -> None:
    for job in jobs:
        if job.future.done():  # its caller was cancelled
            if job.undo is not None and job.error is None:
                job.undo(job.result)
        elif job.error is not None:
            job.future.set_exception(job.error)
        else:
            job.future.set_result(job.result)


def closed_error() -> StoreClosedError:
    return StoreClosedError("The store has been closed; open it again.")
