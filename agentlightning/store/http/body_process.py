"""The process that reads large bodies, as the store's server sees it: started when it is first needed, again when it
has died. It reads one body at a time; attempts take turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable

import msgspec

from agentlightning.errors import StoreUnavailableError
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.places import Places
from agentlightning.store.http.reading import Found, Given, Refused, Row

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""How long reading one body may take."""
START_SECONDS = 60.0
"""How long the process may take to start, beside that."""

_encoder = msgspec.msgpack.Encoder()
_answer = msgspec.msgpack.Decoder(Found | Refused)
_part = msgspec.msgpack.Decoder(list[list[str | float | int | None]])


class BodyProcess:
    """Asked by `read`, from one event loop; `close` ends it."""

    def __init__(self, seconds: float = SECONDS, charge: Callable[[Hashable, float], None] = lambda *_: None) -> None:
        """`charge` is told how long a body took, and whose it was."""
        self._seconds = seconds
        self._charge = charge
        self._places = Places(1)
        self._running: HelperProcess | None = None
        self._reading: set[asyncio.Task[tuple[Found | Refused, list[bytes]]]] = set()

    async def read(self, given: Given, body: bytes, owner: Hashable) -> tuple[Found | Refused, list[bytes]]:
        """As `reading.read`, with the parts as they came: see `rows_of`.

        Raises `StoreUnavailableError` if the process does not live to answer.
        """
        # To its end, whoever goes away: the next answer comes after this one.
        reading = asyncio.create_task(self._read(given, body, owner))
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return await asyncio.shield(reading)

    async def _read(self, given: Given, body: bytes, owner: Hashable) -> tuple[Found | Refused, list[bytes]]:
        async with self._places.one(owner):
            if self._running is not None and self._running.ended:
                await self._end()
            seconds = self._seconds + (self._running is None) * START_SECONDS
            try:
                if self._running is None:
                    self._running = await HelperProcess.start("agentlightning.store.http.reader")
                began = time.perf_counter()
                try:
                    async with asyncio.timeout(seconds):
                        return await _exchange(self._running, given, body)
                finally:
                    self._charge(owner, time.perf_counter() - began)
            except TimeoutError:
                await self._end()
                why = f"Reading the request took more than {self._seconds:g} s; send smaller batches."
                return Refused(413, why), []
            except (OSError, EOFError) as error:
                how = f"cannot be started ({error})" if self._running is None else f"ended {await self._end()}"
                logger.error("The process that reads large requests %s. The next one starts it again.", how)
                why = "The process that reads large requests did not live to read this one. Try again."
                raise StoreUnavailableError(why) from error
            except BaseException:  # cancelled: what it would still say belongs to nobody
                await self._end()
                raise

    async def close(self) -> None:
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        await self._end()

    async def _end(self) -> str:
        """End it if it lives, and say how it ended."""
        running, self._running = self._running, None
        return "" if running is None else await running.death()


async def _exchange(process: HelperProcess, given: Given, body: bytes) -> tuple[Found | Refused, list[bytes]]:
    await process.send(_encoder.encode(given), [body])
    answer = _answer.decode(await process.receive())
    parts = answer.parts if isinstance(answer, Found) else 0
    return answer, [await process.receive() for _ in range(parts)]


def rows_of(part: bytes) -> list[Row]:
    return list(_part.decode(part))
