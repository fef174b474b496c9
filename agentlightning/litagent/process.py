"""Running one untrusted command: in a process group of its own, with bounded output and memory, killed as a whole tree.

Whatever way the wait ends (exit, cancellation, too much output), no process of the command is left when `run_command`
returns. On Linux a process that leaves its group is found by a mark in its environment; one that also wipes its
environment is adopted by a small process in front of the command (`adopter`). Windows is not supported.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from asyncio.subprocess import SubprocessStreamProtocol
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentlightning.arguments import explained_class
from agentlightning.errors import AgentError
from agentlightning.litagent import adopter
from agentlightning.types.ids import random_hex

KEEP_BYTES = 32 * 1024
"""So much of the beginning and so much of the end of each output stream is kept."""
GRACE_SECONDS = 2.0
"""Between SIGTERM and SIGKILL."""
MARK = "AGL_PROCESS_MARK"
_CHUNK = 64 * 1024
_ADOPTER = (sys.executable, "-I", "-S", adopter.__file__)


@explained_class
@dataclass(frozen=True, slots=True)
class Limits:
    """What one command may use; it is inherited by everything it starts, and each process has it for itself."""

    output_bytes: int = 256 * 1024 * 1024
    """On stdout and stderr each; a command that writes more is killed."""
    memory_bytes: int | None = None
    """Address space. Node and others reserve far more than they use: leave it out, or give them gigabytes."""
    file_bytes: int | None = 4 * 1024**3
    """Size of one file."""
    cpu_seconds: int | None = None
    """Processor time of each process."""

    def wrap(self, command: Sequence[str]) -> list[str]:
        """The command behind a shell that sets the limits and then becomes the command."""
        given = {
            "-v": self.memory_bytes and self.memory_bytes // 1024,
            "-f": self.file_bytes and self.file_bytes // 512,
            "-t": self.cpu_seconds,
        }
        script = "".join(f"ulimit {flag} {value} && " for flag, value in given.items() if value is not None)
        return ["/bin/sh", "-c", f'{script}exec "$@"', "sh", *command]


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended by itself. Outputs are cut in the middle beyond 2 × KEEP_BYTES."""

    exit_code: int
    stdout: str
    stderr: str
    seconds: float


class Output:
    """One stream as it is read: its beginning, its end, and how long it was."""

    def __init__(self) -> None:
        self.size = 0
        self._head = bytearray()
        self._tail = bytearray()

    def add(self, data: bytes) -> None:
        self.size += len(data)
        left = KEEP_BYTES - len(self._head)
        self._head += data[:left]
        self._tail += data[left:] if left > 0 else data
        del self._tail[:-KEEP_BYTES]

    def text(self) -> str:
        dropped = self.size - len(self._head) - len(self._tail)
        middle = f"\n… {dropped} bytes left out …\n".encode() if dropped else b""
        return (bytes(self._head) + middle + bytes(self._tail)).decode(errors="replace")


@dataclass(slots=True)
class Captured:
    """What a command wrote so far; it can be read whichever way the command ended."""

    stdout: Output
    stderr: Output

    @classmethod
    def empty(cls) -> Captured:
        return cls(Output(), Output())


async def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    stdin: bytes = b"",
    limits: Limits,
    captured: Captured | None = None,
    adopting: bool = False,
) -> Finished:
    """Run the command to its end. Raises AgentError when it cannot be started or writes too much.

    `adopting` is for a command that nothing isolates; containers and sandboxes end their processes themselves.
    """
    captured = captured or Captured.empty()
    adopting = adopting and sys.platform == "linux"
    mark = random_hex(8)
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: SubprocessStreamProtocol(limit=_CHUNK, loop=loop),
        *(_ADOPTER if adopting else ()),
        *limits.wrap(command),
        cwd=folder,
        env={**environment, MARK: mark},
        start_new_session=True,
    )
    process = asyncio.subprocess.Process(transport, protocol, loop)
    try:
        await _communicate(process, stdin, captured, limits.output_bytes)
    finally:
        await asyncio.shield(kill_tree(process, mark, adopting=adopting))
        transport.close()  # pipes that were not read to their end
    assert process.returncode is not None
    seconds = time.monotonic() - began
    if process.returncode == 127:
        raise AgentError(f"The program could not be started: {shlex.join(command)}\n{captured.stderr.text()}")
    return Finished(process.returncode, captured.stdout.text(), captured.stderr.text(), seconds)


async def _communicate(process: asyncio.subprocess.Process, stdin: bytes, captured: Captured, limit: int) -> None:
    """Feed stdin and read both outputs until the command itself has ended.

    Children that stay behind may hold the pipes open: what they write after the command's end is not waited for.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        asyncio.create_task(_read(process.stdout, captured.stdout, limit)),
        asyncio.create_task(_read(process.stderr, captured.stderr, limit)),
    ]
    feeding = asyncio.create_task(_feed(process.stdin, stdin))
    ending = asyncio.create_task(process.wait())
    try:
        pending: set[asyncio.Task[None] | asyncio.Task[int]] = {*readers, ending}
        while not ending.done():
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        done, _ = await asyncio.wait(readers, timeout=0.5)  # what is still in the pipes
        for task in done:
            task.result()
    finally:
        for task in (*readers, feeding, ending):
            task.cancel()
        everything: list[asyncio.Task[Any]] = [*readers, feeding, ending]
        await asyncio.gather(*everything, return_exceptions=True)


async def _read(stream: asyncio.StreamReader, output: Output, limit: int) -> None:
    while data := await stream.read(_CHUNK):
        output.add(data)
        if output.size > limit:
            raise AgentError(f"The program wrote more than {limit} bytes and was stopped (Limits.output_bytes).")


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its task
        stream.write(data)
        await stream.drain()
    stream.close()


async def kill_tree(process: asyncio.subprocess.Process, mark: str, *, adopting: bool = False) -> None:
    """End the command and all it started: politely while it still runs, then by force."""
    if process.returncode is None:
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE_SECONDS)
    if adopting and process.returncode is None:  # their adopter holds them together as long as it lives
        await _kill_all(lambda: _below(process.pid))
    _signal_group(process.pid, signal.SIGKILL)
    await _kill_all(lambda: _marked(mark))
    await process.wait()


async def _kill_all(find: Callable[[], list[int]]) -> None:
    """Kill what is found until nothing is; one that forks while we look is found the next time."""
    for _ in range(20):
        strays = await asyncio.to_thread(find)
        if not strays:
            return
        for pid in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.01)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _below(pid: int) -> list[int]:
    """The process's children, and theirs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    found, level = [], {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        found += level
    return found


def _marked(mark: str) -> list[int]:
    """The processes whose environment carries the mark."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
