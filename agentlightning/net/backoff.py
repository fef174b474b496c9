"""Who is refused waits: an attempt whose requests are refused again and again leaves the machine to the others.

To refuse a request takes time too: megabytes come in, are decoded, counted or compiled before it is known that they go
beyond a limit. After a refusal the attempt's next request is read so many times later than that took, and requests that
came meanwhile are read one after another, until one is not refused. The gateway and the store's server do so, each for
itself.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any

FACTOR = 10.0
"""How many times as long as its refusals took an attempt waits, where nobody says otherwise."""
_LEAST = 0.0005
"""Seconds that any refusal takes."""
_BYTES_PER_SECOND = 50e6
"""How fast bodies come in, with all that passes them on."""
_LONGEST = 30.0
"""Seconds that a refusal makes the next request wait at most."""
_MANY = 1024
"""Attempts that are remembered before those are forgotten that need not wait any more."""


class ObservedRequest:
    """A request, and what is seen of it: how many bytes came, and with which status it was answered."""

    def __init__(self, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        self._receive = receive
        self._send = send
        self.owner: Hashable | None = None
        """The attempt, once it is known."""
        self.began = 0.0
        self.size = 0
        self.status: int | None = None
        self.samples = False
        """Whether it is answered by sampling: who hangs up then has not been refused."""
        self.forwarded = False
        """Whether its status is another provider's."""

    async def receive(self) -> Any:
        message = await self._receive()
        self.size += len(message.get("body", b""))
        return message

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)

    @property
    def refused(self) -> bool:
        """Whether it came to nothing by what the client did."""
        if self.forwarded:
            return False
        return not self.samples if self.status is None else 400 <= self.status < 500


class _RefusedAttempt:
    """The requests of an attempt that has been refused something."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.refused = 0.0
        self.pause = 0.0
        """Between two requests."""
        self.until = 0.0
        """When the next one is read."""
        self.over = asyncio.Event()
        """Set when all may go on."""

    async def next(self) -> None:
        """Wait until the next one may be read."""
        loop = asyncio.get_running_loop()
        while not self.over.is_set() and (left := self.until - loop.time()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.over.wait()
        self.until = loop.time() + self.pause


class Backoff:
    """`factor`: how many times as long as its refusals took an attempt waits."""

    def __init__(self, factor: float = FACTOR) -> None:
        self._factor = factor
        self._spent: defaultdict[Hashable, float] = defaultdict(float)
        self._lines: dict[Hashable, _RefusedAttempt] = {}

    def charge(self, owner: Hashable, seconds: float) -> None:
        """The process for large requests has worked so long for a request of the attempt's."""
        if len(self._spent) > _MANY:  # of clients that went away
            self._spent.clear()
        self._spent[owner] += seconds

    async def wait(self, watched: ObservedRequest, owner: Hashable, seconds: float) -> str | None:
        """Wait until the attempt's next request may be read. Returns why it is refused if that takes longer than
        `seconds`.
        """
        line = self._lines.get(owner)
        if line is not None:
            try:
                async with asyncio.timeout(seconds), line.lock:
                    await line.next()
            except TimeoutError:
                return (
                    "Requests of this attempt were refused, so its next ones wait; this one has waited for "
                    f"{seconds:g} s (refused_wait). Try again."
                )
        watched.owner, watched.began = owner, asyncio.get_running_loop().time()
        return None

    def settle(self, watched: ObservedRequest) -> None:
        """A request has ended: if it was refused the next one waits, and if it was not, all may go on."""
        owner = watched.owner
        if owner is None:
            return
        spent = self._spent.pop(owner, 0.0)
        line = self._lines.get(owner)
        if not watched.refused:
            if line is not None and watched.began >= line.refused:
                self._lines.pop(owner).over.set()
            return
        now = asyncio.get_running_loop().time()
        if line is None:
            self._forget(now)
            line = self._lines[owner] = _RefusedAttempt()
        line.refused = now
        line.pause = min(self._factor * (spent + watched.size / _BYTES_PER_SECOND + _LEAST), _LONGEST)
        line.until = min(max(line.until, now) + line.pause, now + _LONGEST)

    def _forget(self, now: float) -> None:
        if len(self._lines) >= _MANY:
            self._lines = {o: line for o, line in self._lines.items() if line.until > now or line.lock.locked()}
