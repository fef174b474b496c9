"""The client's way to a store's server: pools per event loop, retries, and errors as they were raised there.

Every request of the store may be repeated (ids come from the client), so everything that a retry can heal is retried: a
connection that broke, a server that restarts, a store that is not available at the moment.

`Batcher` sends small writes together: what is added during a request goes with the next one. Adding returns when the
write is stored. At most `_MAX_WAITING` writes wait; a further one waits for room.
"""

from __future__ import annotations

import asyncio
import io
import logging
import random
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agentlightning.errors import (
    ConfigError,
    ConflictError,
    NotFoundError,
    StoreClosedError,
    StoreError,
    StoreUnavailableError,
)
from agentlightning.keys import not_empty
from agentlightning.net.local_keys import find_key
from agentlightning.net.outgoing import LARGE, UnwantedAnswer, http_session, reason_of
from agentlightning.store.http.wire import JSON, MAX_WAIT_SECONDS, NOTHING_AT

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = {"work": 256, "waits": 0, "beats": 256}
"""Of each pool (0: no limit). A heartbeat must not wait for a connection: not behind long polls or work, nor behind the
heartbeats of hundreds of runners in one process when the server takes seconds for each."""
PIECEMEAL_BYTES = 2**20
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
REPORTED_AFTER, REPORTED_AGAIN = 3.0, 60.0
"""After how many seconds a store that is away is reported, and after how many more it is reported again."""
_ERRORS: dict[int, type[StoreError]] = {404: NotFoundError, 409: ConflictError, 503: StoreUnavailableError}


class Http:
    """Requests to one server. `retry_seconds` is how long a request is tried before it fails."""

    def __init__(self, url: str, key: str | None, retry_seconds: float, request_seconds: float):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"The address of a store is {url!r}; it begins with http://, as http://10.0.0.1:4747 does."
            )
        self.url = url.rstrip("/")
        not_empty(key, f"The key for the store at {url}")
        self._key = key
        self._retry_seconds = retry_seconds
        self._request_seconds = request_seconds
        self._sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, aiohttp.ClientSession]] = (
            weakref.WeakKeyDictionary()
        )
        self._closed = False
        self._reported = -REPORTED_AGAIN

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = JSON,
        *,
        wait: float = 0.0,
        pool: str = "work",
    ) -> bytes:
        """Return the answer's body; `wait` is how long the server may take before it answers."""
        pool = "waits" if wait else pool
        end = time.monotonic() + wait + self._retry_seconds
        pause, failing_since = FIRST_PAUSE, None
        while True:
            try:
                return await self._once(method, path, body, content_type, wait, pool)
            except StoreClosedError:
                raise
            except (aiohttp.ClientError, TimeoutError, OSError, StoreUnavailableError) as error:
                if self._closed or time.monotonic() + pause > end or isinstance(error, UnwantedAnswer):
                    raise self._unreachable(error) from error
                logger.debug("%s %s failed (%s); trying again in %.2f s", method, path, error, pause)
                failing_since = failing_since or time.monotonic()
                self._report(error, failing_since, end)
            # Many clients must not come back at the same moment.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _once(
        self, method: str, path: str, body: bytes | None, content_type: str, wait: float, pool: str
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=self._request_seconds + wait)
        headers = {"Content-Type": content_type} if body is not None else {}
        if (key := self._key or find_key(self.url)) is not None:
            headers["Authorization"] = f"Bearer {key}"
        # aiohttp wants large bodies as files, which it sends piece by piece.
        data = io.BytesIO(body) if body is not None and len(body) > PIECEMEAL_BYTES else body
        url = self.url + path
        async with self._session(pool).request(method, url, data=data, headers=headers, timeout=timeout) as response:
            answer = await response.read()
            if response.status < 300:
                return answer
        raise error_of(response.status, self._another_server(response.status, answer) or _detail(answer))

    def _another_server(self, status: int, body: bytes) -> str | None:
        """The words for an address that belongs to another server, or continues behind the store's."""
        given = urlsplit(self.url)
        if status == 404 and given.path and _detail(body).startswith(NOTHING_AT):
            host = f"{given.scheme}://{given.netloc}"
            return f"The store's address is given without a path: {host}, and not {self.url}."
        if status in (404, 405) and not _is_problem(body):
            return f"The server at {self.url} is no store: it answers {status}. Give the address that agl store prints."
        return None

    def _session(self, pool: str) -> aiohttp.ClientSession:
        if self._closed:
            raise StoreClosedError("The store's client has been closed; make a new one.")
        sessions = self._sessions.setdefault(asyncio.get_running_loop(), {})
        if pool not in sessions:
            connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS[pool], keepalive_timeout=60.0)
            sessions[pool] = http_session(most=LARGE, connector=connector)
        return sessions[pool]

    def _report(self, error: Exception, failing_since: float, end: float) -> None:
        """Say that the store is not there, where a request has failed for a while: all of them share the words."""
        now = time.monotonic()
        if now - failing_since > REPORTED_AFTER and now - self._reported > REPORTED_AGAIN:
            self._reported = now
            logger.warning("%s It is tried again for %.0f s.", self._unreachable(error), end - now)

    def _unreachable(self, error: Exception) -> StoreError:
        if self._closed:
            return StoreClosedError("The store's client was closed while it tried to reach the server.")
        if isinstance(error, StoreUnavailableError):
            return error
        why = f"The store at {self.url} cannot be reached: {reason_of(error)}."
        return StoreUnavailableError(f"{why} Check that it runs (agl store), and its address.")

    async def close(self) -> None:
        """Close the pools; those of other event loops are closed there."""
        self._closed = True
        here = asyncio.get_running_loop()
        for loop, sessions in list(self._sessions.items()):
            for session in list(sessions.values()):
                if loop is here:
                    await session.close()
                elif loop.is_running():
                    await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(session.close(), loop))


async def long_poll(
    poll: Callable[[float], Any], timeout: float | None, enough: Callable[[list[Any]], bool]
) -> list[Any]:
    """Repeat a request that waits on the server until its answer is enough or the time is over."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        left = MAX_WAIT_SECONDS if end is None else max(end - time.monotonic(), 0.0)
        answer = await poll(min(left, MAX_WAIT_SECONDS))
        if enough(answer) or (end is not None and time.monotonic() >= end):
            return answer


def error_of(status: int, detail: str) -> StoreError:
    """The error that the server raised."""
    return _ERRORS.get(status, StoreError)(detail or f"The store's server answered {status}.")


def _is_problem(body: bytes) -> bool:
    try:
        return "detail" in msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.MsgspecError:
        return False


def _detail(body: bytes) -> str:
    """The detail of a problem document, or the body of anything else (a proxy's page, say)."""
    try:
        return str(msgspec.json.decode(body, type=dict[str, Any])["detail"])
    except (msgspec.MsgspecError, KeyError):
        return body[:500].decode(errors="replace")


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MAX_BATCH = 256
_MAX_WAITING = 8192


class Batcher(Generic[_Item, _Result]):
    """Batches of items, on one event loop. `send` returns a result, or an error, for each item."""

    def __init__(self, send: Callable[[Sequence[_Item]], Awaitable[Sequence[_Result | Exception]]]):
        self._send = send
        self._waiting: list[tuple[_Item, asyncio.Future[_Result]]] = []
        self._slots = asyncio.Semaphore(_MAX_WAITING)
        self._flushing: asyncio.Task[None] | None = None

    async def add(self, item: _Item) -> _Result:
        async with self._slots:
            future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
            self._waiting.append((item, future))
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush(), name="agl-store-batch")
            return await future

    async def _flush(self) -> None:
        while self._waiting:
            batch = self._waiting[:_MAX_BATCH]
            del self._waiting[:_MAX_BATCH]
            results: Sequence[_Result | Exception]
            try:
                results = await self._send([item for item, _ in batch])
            except Exception as error:  # whatever it is, the callers of this batch get it, and the next one is tried
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # its caller was cancelled
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
