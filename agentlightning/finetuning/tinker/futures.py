"""What clients are promised: work that goes on, by an id under which its result is fetched.

A result stays for some minutes after it was fetched, because a client whose connection broke fetches it again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentlightning.errors import AgentLightningError, ConfigError, ModelError
from agentlightning.gateway.exchange import Refusal

logger = logging.getLogger(__name__)

POLL_SECONDS = 25.0
"""How long a client's question for a result is kept waiting; it gives up after 45."""
MOST_AT_ONCE = {"samples": 1 << 16, "bytes of data": 512 << 20}
"""What the work of one key's promises may take together."""
_KEPT_SECONDS, _UNFETCHED_SECONDS = 300.0, 3600.0
"""How long a result stays after it was fetched, and how long one stays that nobody fetches."""
MOST_OPEN = 8192
"""Promises of one key that are worked on or were not fetched; and of all keys that were fetched and are kept."""

MOST_HELD = 1 << 30
"""Bytes of the results of one key that are kept."""

Result = bytes | dict[str, Any]
"""Of protobuf, or of JSON."""


@dataclass
class _Promise:
    owner: str
    task: asyncio.Task[Result]
    forget_at: float | None = None
    """None while it is worked on."""
    fetched: bool = False
    cost: tuple[str, int] | None = None
    size: int = 0
    """Bytes of its result."""
    metadata: dict[str, Any] = field(default_factory=dict)


class Promises:
    """By their ids, those of all keys."""

    def __init__(self) -> None:
        self._kept: dict[str, _Promise] = {}
        self._open: Counter[str] = Counter()
        """By key, those that were not fetched."""
        self._taken: Counter[tuple[str, str]] = Counter()
        """By key, what its work takes."""
        self._held: Counter[str] = Counter()
        """By key, the bytes of its results."""

    def make(
        self,
        owner: str,
        key: str,
        work: Callable[[], Awaitable[Result]],
        *,
        cost: tuple[str, int] | None = None,
        **metadata: Any,
    ) -> dict[str, Any]:
        """Begin the work, unless it was begun under this id before; what the client reads of it. `cost` is what it
        takes of `MOST_AT_ONCE`. Raises `Refusal` where the key has too much of that, or too many results that it did
        not fetch; its client waits then and asks again."""
        self._sweep()
        promise = self._kept.get(key)
        if promise is None:
            if self._open[owner] >= MOST_OPEN:
                words = f"This key has {MOST_OPEN} requests that are worked on or were not fetched; fetch some."
                raise Refusal(words, status=429, code="too_many_requests")
            self._drop_fetched(owner)
            self._take(owner, cost)
            task = asyncio.ensure_future(work())
            promise = self._kept[key] = _Promise(owner, task, cost=cost, metadata=metadata)
            self._open[owner] += 1
            task.add_done_callback(lambda _: self._ended(promise))
        return {"request_id": key, **promise.metadata}

    async def result(self, owner: str, key: str, seconds: float = POLL_SECONDS) -> Result:
        """What came of it, or that it is still worked on. Raises `Refusal` for an id of which nothing is known."""
        promise = self._kept.get(key)
        if promise is None or promise.owner != owner:
            raise Refusal(
                f"Nothing is known of the request '{key[:200]}': its result was fetched long ago, or the server began "
                "anew.",
                status=410,
                code="promise_lost",
            )
        await asyncio.wait((promise.task,), timeout=seconds)
        if not promise.task.done():
            return {"type": "try_again", "request_id": key, "queue_state": "active"}
        promise.forget_at = time.monotonic() + _KEPT_SECONDS
        if not promise.fetched:
            promise.fetched = True
            self._open[owner] -= 1
        return _outcome(promise.task)

    def cancel(self, owner: str, key: str) -> None:
        """End the work, if there is any."""
        promise = self._kept.get(key)
        if promise is not None and promise.owner == owner:
            promise.task.cancel()

    def cancel_all(self, client: str) -> None:
        """End all work of a client that is gone."""
        for key, promise in self._kept.items():
            if key.startswith(f"{client}:") and not promise.task.done():
                promise.task.cancel()

    async def close(self) -> None:
        tasks = [promise.task for promise in self._kept.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take(self, owner: str, cost: tuple[str, int] | None) -> None:
        if cost is None:
            return
        name, amount = cost
        taken = self._taken[owner, name]
        if taken and taken + amount > MOST_AT_ONCE[name]:
            words = f"The requests of this key have {taken} {name} under way, and {MOST_AT_ONCE[name]} may be."
            raise Refusal(words, status=429, code="too_many_requests")
        self._taken[owner, name] += amount

    def _drop_fetched(self, owner: str) -> None:
        """Forget results that were fetched, the oldest first, where those of a key take too much."""
        if self._held[owner] < MOST_HELD:
            return
        for key in [key for key, promise in self._kept.items() if promise.owner == owner and promise.fetched]:
            self._forget(key)
            if self._held[owner] < MOST_HELD:
                return
        words = f"The results of this key that were not fetched take {self._held[owner]} bytes; fetch some."
        raise Refusal(words, status=429, code="too_many_requests")

    def _forget(self, key: str) -> None:
        promise = self._kept.pop(key)
        self._held[promise.owner] -= promise.size
        if not promise.fetched:
            self._open[promise.owner] -= 1

    def _ended(self, promise: _Promise) -> None:
        if promise.cost is not None:
            self._taken[promise.owner, promise.cost[0]] -= promise.cost[1]
        if not promise.task.cancelled() and promise.task.exception() is None:  # which whoever fetches it is told
            result = promise.task.result()
            promise.size = len(result) if isinstance(result, bytes) else 0
            self._held[promise.owner] += promise.size
        promise.forget_at = time.monotonic() + _UNFETCHED_SECONDS

    def _sweep(self) -> None:
        """Now and then, forget those whose time is over, and the oldest of many that were fetched."""
        if len(self._kept) % 64:
            return
        now = time.monotonic()
        late = [k for k, p in self._kept.items() if p.forget_at is not None and p.forget_at < now]
        fetched = [k for k, p in self._kept.items() if p.fetched]
        for key in {*late, *fetched[: max(len(fetched) - MOST_OPEN, 0)]}:
            self._forget(key)


def _outcome(task: asyncio.Task[Result]) -> Result:
    """The result, or why there is none and whose fault that is."""
    if task.cancelled():
        return {"error": "The request was cancelled, or what it was for is gone.", "category": "user"}
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, Refusal | ConfigError | ModelError):
        return {"error": str(error), "category": "user"}
    if isinstance(error, AgentLightningError):
        return {"error": str(error), "category": "server"}
    logger.error("A request failed", exc_info=error)
    return {"error": f"The server failed: {type(error).__name__}. What happened is in its log.", "category": "server"}


def as_json(result: dict[str, Any]) -> bytes:
    return msgspec.json.encode(result)
