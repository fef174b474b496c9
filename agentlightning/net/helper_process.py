"""A process of this package's own beside a server's event loop, for work that would hold the loop up.

The two talk over a socket, in frames of two lengths, a message, and bytes that go as they are. The process answers one
frame after another, and ends when the socket does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO

from agentlightning.importing import import_environment, look_where_the_parent_does

LENGTHS = struct.Struct("<QQ")
"""Of a frame: of its message, and of the bytes that follow."""
NICE = 5
"""Where there are too few cores, short requests go before what is done beside them."""
_LAST_WORDS = 2000
_WRITTEN_AT_ONCE = 2**18


def frame(message: bytes, follows: int = 0) -> bytes:
    """A frame up to the bytes that follow."""
    return LENGTHS.pack(len(message), follows) + message


# ---- in the process --------------------------------------------------------------------------------------------------


def answer_the_parent(main: Callable[[socket.socket], None]) -> None:
    """Run `main` on the socket whose number is the command's argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the parent, whose end is the socket's
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICE)
    look_where_the_parent_does()
    main(socket.socket(fileno=int(sys.argv[1])))


def frames(channel: socket.socket) -> Iterator[tuple[bytearray, bytearray]]:
    """The message and the bytes of each frame, until the socket ends."""
    while head := _received(channel, LENGTHS.size):
        length, follows = LENGTHS.unpack(head)
        yield _received(channel, length), _received(channel, follows)


def _received(channel: socket.socket, size: int) -> bytearray:
    """So many bytes, or none where the socket ends."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        got = channel.recv_into(view[at:])
        if not got:
            return bytearray()
        at += got
    return buffer


# ---- in the server ---------------------------------------------------------------------------------------------------


class HelperProcess:
    """One process from its start to its end."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        output: IO[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self._process = process
        self._output = output
        self._reader = reader
        self._writer = writer
        self._sending = False
        self._waiting: list[bytes] = []
        """Short frames that go after the one that is being sent."""
        self.has_answered = False
        self._ending: asyncio.Task[str] | None = None

    @classmethod
    async def start(cls, module: str, environment: Mapping[str, str] | None = None) -> HelperProcess:
        """Run `python -m module`, which calls `answer_the_parent`. Raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        output = TemporaryFile()  # noqa: SIM115 (closed by `death`)
        try:
            with theirs:
                process = await asyncio.to_thread(_spawn, module, theirs.fileno(), output, environment or {})
        except BaseException:
            ours.close()
            output.close()
            raise
        ours.setblocking(False)
        return cls(process, output, *await asyncio.open_unix_connection(sock=ours))

    async def send(self, message: bytes, body: Sequence[bytes] = ()) -> None:
        """Send a frame; others get a turn in between."""
        self._sending = True
        self._writer.write(frame(message, sum(map(len, body))))
        for part in body:
            for at in range(0, len(part), _WRITTEN_AT_ONCE):
                self._writer.write(memoryview(part)[at : at + _WRITTEN_AT_ONCE])
                await self._writer.drain()
        self._sending = False
        self._writer.writelines(self._waiting)
        self._waiting.clear()
        await self._writer.drain()

    def send_soon(self, message: bytes) -> None:
        """Send a short frame without waiting, after the frame that is being sent."""
        self._waiting.append(frame(message))
        if not self._sending:
            self._writer.writelines(self._waiting)
            self._waiting.clear()

    async def receive(self) -> bytes:
        """The message of the next frame. Raises EOFError or ConnectionError where the process has ended."""
        length, _ = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        message = await self._reader.readexactly(length)
        self.has_answered = True
        return message

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    async def death(self) -> str:
        """End it if it lives, and say how it ended. Several may wait for that."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
        return await asyncio.shield(self._ending)

    async def _end(self) -> str:
        self._process.kill()
        self._writer.close()
        code = await asyncio.to_thread(self._process.wait)
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - _LAST_WORDS))
            words = output.read().decode(errors="replace").strip()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (the system does that when memory runs out)"
        return f"{how}{': ' if words else ''}{words}"


def _spawn(module: str, channel: int, output: IO[bytes], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, str(channel)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[channel],
        env={**import_environment(), **environment},
        start_new_session=True,
    )
