"""Asynchronous sampling: it may run ahead of learning, by at most `max_staleness` steps, which stay in order.

With `max_staleness` 0 a step is sampled only when the one before it is learned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from agentlightning.algorithm.episode import Episode


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The rollouts of one step."""

    episodes: Sequence[Episode]
    tasks: Sequence[int]
    """The tasks of these rollouts, as indices into the data set."""
    position: int
    """How many tasks were taken since the start of the run, these included."""
    began: float
    ended: float
    """Seconds since the epoch."""
    carried: Sequence[int] = ()
    """Tasks that were taken and whose rollouts are not finished; they come with a later step."""
    dropped: Sequence[Episode] = ()
    """Rollouts of groups that dynamic sampling replaced: nothing is learned from them."""


class AsynchronousSampling:
    """An async context manager: sampling goes on beside the block and ends with it."""

    def __init__(
        self,
        sample: Callable[[int, int], Awaitable[Sampled | None]],
        *,
        done: int,
        position: int,
        max_staleness: int,
    ) -> None:
        """`sample(step, position)` samples step `step` (counted from 1); None: there is none."""
        self._sample = sample
        self._done = done
        self._position = position
        self._max_staleness = max_staleness
        self._learned = asyncio.Event()
        self._ready: asyncio.Queue[Sampled] = asyncio.Queue()

    async def __aenter__(self) -> Self:
        self._producer = asyncio.create_task(self._produce())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._producer.cancel()
        await asyncio.gather(self._producer, return_exceptions=True)

    async def next(self, done: int) -> Sampled | None:
        """The rollouts of the step after `done` learned ones; None after the last. Raises what sampling raised."""
        self._done = done
        self._learned.set()
        getting = asyncio.create_task(self._ready.get())
        try:
            await asyncio.wait({getting, self._producer}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        self._producer.result()
        return None

    async def _produce(self) -> None:
        step = self._done + 1
        while True:
            while step > self._done + 1 + self._max_staleness:
                self._learned.clear()
                await self._learned.wait()
            sampled = await self._sample(step, self._position)
            if sampled is None:
                return
            self._position = sampled.position
            self._ready.put_nowait(sampled)
            step += 1
