"""The model process as its parent sees it: how it is started, its output, how it ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

from agentlightning.backend.embedded.connection import Connection
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.importing import import_environment

logger = logging.getLogger(__name__)

_WORDS = 20
"""How many lines of its output a dead process is quoted with."""

_LEVELS = logging.getLevelNamesMapping()
"""By the word that the child's own log lines begin with."""


@contextmanager
def _own_stderr() -> Iterator[Sequence[int]]:
    """A copy of this process's stderr, where it has one: the child's to say there that this process is gone."""
    try:
        copy = os.dup(2)
    except OSError:
        yield ()
        return
    try:
        yield (copy,)
    finally:
        os.close(copy)


class Child(Connection):
    """A server in a process of its own, from `spawn` to its end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(self._supervise)
        self.pid = process.pid
        self._process = process
        self._output: deque[str] = deque(maxlen=_WORDS)

    @classmethod
    async def spawn(cls, settings: ProcessSettings) -> Self:
        """Start the process and hand it its settings; it is usable once `ready` is done."""
        ours, theirs = socket.socketpair()
        # Threads that spin while they wait make learning several times slower when another process wants a core.
        # What Apple's GPU has no kernel for is computed on the CPU rather than refused.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "PYTORCH_ENABLE_MPS_FALLBACK": "1", **import_environment()}
        with theirs, _own_stderr() as terminal:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "agentlightning.backend.embedded", *map(str, terminal)),
                str(theirs.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[*terminal, theirs.fileno()],
                env=environment,
                start_new_session=True,  # a Ctrl-C is for the parent alone, also while this one still starts
            )
        child = cls(process)
        ours.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: child, sock=ours)
        child.send(settings)
        return child

    def last_words(self) -> str:
        return "".join(f"\n  | {line}" for line in self._output)

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def _supervise(self) -> str:
        """Follow the process's output until it ends."""
        await self._follow_output()
        return self._describe_death(await self._process.wait())

    async def _follow_output(self) -> None:
        assert self._process.stdout is not None
        rest = ""
        while data := await self._process.stdout.read(1 << 16):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            for line in lines:
                self._output.append(line)
                level = _LEVELS.get(line.partition(" ")[0], logging.INFO)
                logger.log(level, "model process: %s", line)
        if rest:
            self._output.append(rest)

    def _describe_death(self, code: int) -> str:
        how = f"with exit code {code}"
        if code < 0:
            how = f"by signal {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (the system does that when memory runs out)"
        return (
            f"The model process ended {how}.{self.last_words()}\n"
            "Requests that it had are lost; a run goes on from its last checkpoint."
        )
