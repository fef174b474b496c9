"""The process that reads large bodies, as the store's server sees it. It reads one body at a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from functools import partial

import msgspec

from agentlightning.errors import StoreUnavailableError
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.supervisor import HelperLost, Supervisor
from agentlightning.store.http.reading import Found, Given, Refused, Row

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""How long reading one body may take."""
START_SECONDS = 60.0
"""How long the process may take to start, in addition to that."""

_encoder = msgspec.msgpack.Encoder()
_answer = msgspec.msgpack.Decoder(Found | Refused)
_part = msgspec.msgpack.Decoder(list[list[str | float | int | None]])


class BodyProcess:
    """Asked by `read`, from one event loop; `close` ends it."""

    def __init__(self, seconds: float = SECONDS, charge: Callable[[Hashable, float], None] = lambda *_: None) -> None:
        """`charge` is told how long a body took, and whose it was."""
        self._seconds = seconds
        self._charge = charge
        self._helper = Supervisor("agentlightning.store.http.reader")

    async def read(self, given: Given, body: bytes, owner: Hashable) -> tuple[Found | Refused, list[bytes]]:
        """As `reading.read`, with the parts as they came: see `rows_of`. Attempts take turns.

        Raises `StoreUnavailableError` if the process does not live to answer.
        """
        try:
            return await self._helper.run(owner, partial(self._exchange, given, body, owner))
        except TimeoutError:
            return Refused(413, f"Reading the request took more than {self._seconds:g} s; send smaller batches."), []
        except (OSError, HelperLost) as error:
            how = f"ended {error}" if isinstance(error, HelperLost) else f"cannot be started ({error})"
            logger.error("The process that reads large requests %s. The next one starts it again.", how)
            why = "The process that reads large requests did not live to read this one. Try again."
            raise StoreUnavailableError(why) from error

    async def close(self) -> None:
        await self._helper.close()

    async def _exchange(
        self, given: Given, body: bytes, owner: Hashable, process: HelperProcess
    ) -> tuple[Found | Refused, list[bytes]]:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._seconds + (not process.has_answered) * START_SECONDS):
                await process.send(_encoder.encode(given), [body])
                answer = _answer.decode(await process.receive())
                parts = answer.parts if isinstance(answer, Found) else 0
                return answer, [await process.receive() for _ in range(parts)]
        finally:
            self._charge(owner, time.perf_counter() - began)


def rows_of(part: bytes) -> list[Row]:
    return list(_part.decode(part))
