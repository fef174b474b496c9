"""The process that reads large bodies, as the store's server sees it: started when it is first needed, again when it
has died. It reads one body at a time; attempts take turns.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Hashable

import msgspec

from agentlightning.errors import StoreUnavailableError
from agentlightning.importing import import_environment
from agentlightning.places import Places
from agentlightning.store.http.reader import LENGTHS
from agentlightning.store.http.reading import Found, Given, Refused, Row

logger = logging.getLogger(__name__)

SECONDS = 30.0
"""How long reading one body may take."""
START_SECONDS = 60.0
"""How long the process may take to start, beside that."""
_AT_ONCE = 2**18

_encoder = msgspec.msgpack.Encoder()
_answer = msgspec.msgpack.Decoder(Found | Refused)
_part = msgspec.msgpack.Decoder(list[list[str | float | int | None]])


class ReadElsewhere:
    """Asked by `read`, from one event loop; `close` ends it."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._places = Places(1)
        self._running: _Running | None = None
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
            fresh = self._running is None
            running = self._running = self._running or await _Running.start()
            try:
                async with asyncio.timeout(self._seconds + fresh * START_SECONDS):
                    return await running.read(given, body)
            except TimeoutError:
                await self._end()
                return Refused(
                    413, f"Reading the request took more than {self._seconds:g} s; send smaller batches."
                ), []
            except (OSError, EOFError) as error:
                code = await self._end()
                logger.error("The process that reads large requests ended (%s). The next one starts it again.", code)
                why = "The process that reads large requests ended while it was busy with this one. Try again."
                raise StoreUnavailableError(why) from error
            except BaseException:  # cancelled: what it would still say belongs to nobody
                await self._end()
                raise

    async def close(self) -> None:
        for reading in self._reading:
            reading.cancel()
        await asyncio.gather(*self._reading, return_exceptions=True)
        await self._end()

    async def _end(self) -> int | None:
        running, self._running = self._running, None
        return None if running is None else await running.end()


def rows_of(part: bytes) -> list[Row]:
    return list(_part.decode(part))


class _Running:
    """One process from its start to its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> _Running:
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.to_thread(_spawn, theirs.fileno())
        ours.setblocking(False)
        return cls(process, *await asyncio.open_unix_connection(sock=ours))

    async def read(self, given: Given, body: bytes) -> tuple[Found | Refused, list[bytes]]:
        head = _encoder.encode(given)
        self._writer.write(LENGTHS.pack(len(head), len(body)) + head)
        for at in range(0, len(body), _AT_ONCE):  # others get a turn in between
            self._writer.write(memoryview(body)[at : at + _AT_ONCE])
            await self._writer.drain()
        answer = _answer.decode(await self._message())
        parts = answer.parts if isinstance(answer, Found) else 0
        return answer, [await self._message() for _ in range(parts)]

    async def _message(self) -> bytes:
        said, _ = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        return await self._reader.readexactly(said)

    async def end(self) -> int:
        self._writer.close()
        self._process.kill()
        return await asyncio.to_thread(self._process.wait)


def _spawn(channel: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "agentlightning.store.http.reader", str(channel)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[channel],
        env=import_environment(),
        start_new_session=True,
    )
