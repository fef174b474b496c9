"""Operations on their way to a database thread, and their results on the way back to the event loops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from agentlightning.errors import StoreClosedError
from agentlightning.store.database.transaction import Operation

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_BATCH = 512
"""Operations per commit."""


REPEAT_SECONDS = 60.0


class Complaints:
    """What the watchdog says about its failures: each new one with its traceback, the same again once a minute."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._said = 0.0

    def about(self, error: BaseException) -> None:
        if str(error) != self._last:
            logger.error("The store's watchdog failed; it keeps trying.", exc_info=error)
        elif time.monotonic() - self._said > REPEAT_SECONDS:
            logger.error("The store's watchdog still fails: %s", error)
        else:
            return
        self._last, self._said = str(error), time.monotonic()


class Job:
    """One operation and the future its caller waits for."""

    __slots__ = ("error", "future", "loop", "operation", "result", "rollout_ids", "undo")

    def __init__(
        self,
        operation: Operation[Any],
        undo: Callable[[Any], None] | None,
        future: asyncio.Future[Any],
        loop: asyncio.AbstractEventLoop,
        rollout_ids: Collection[str] = (),
    ):
        self.operation = operation
        self.rollout_ids = rollout_ids
        """Those that exist and that the operation may change, as far as they are known before."""
        self.undo = undo
        """Called on the event loop with the result if the caller was cancelled before it could be delivered."""
        self.future = future
        self.loop = loop
        self.result: Any = None
        self.error: BaseException | None = None


JobQueue = SimpleQueue["Job | None"]
"""None asks a thread to end."""


class Tick(Job):
    """The watchdog's job: nobody waits for it."""

    __slots__ = ()

    def __init__(self, operation: Operation[None]):
        self.operation = operation
        self.rollout_ids = ()
        self.result = None
        self.error = None


def next_batch(queue: JobQueue, wait: float, most: int = MAX_BATCH) -> tuple[list[Job], bool]:
    """What is queued, after waiting up to `wait` seconds for the first job; False with the last batch of all."""
    batch: list[Job] = []
    try:
        job = queue.get(timeout=max(wait, 0.0))
        while job is not None:
            batch.append(job)
            if len(batch) >= most:
                return batch, True
            job = queue.get_nowait()
    except Empty:
        return batch, True
    return batch, False


def submit(
    queue: JobQueue,
    operation: Operation[T],
    undo: Callable[[T], None] | None = None,
    rollout_ids: Collection[str] = (),
) -> asyncio.Future[T]:
    """Hand an operation to a database thread, from any event loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    queue.put(Job(operation, undo, future, loop, rollout_ids))
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


def refuse(queue: JobQueue) -> None:
    """Fail what is still queued on a database that has been closed."""
    left: list[Job] = []
    while not queue.empty():
        job = queue.get()
        if job is not None:
            job.error = closed_error()
            left.append(job)
    deliver(left)


def closed_error() -> StoreClosedError:
    return StoreClosedError("The store has been closed; open it again.")
