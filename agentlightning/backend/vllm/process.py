"""One vLLM server of ours, from its start to its end: its command, its log in the run's folder, its last words."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from agentlightning.backend.vllm import guard
from agentlightning.errors import EngineError
from agentlightning.files import open_private

_WORDS = 20
"""How many lines of its log a dead server is quoted with."""
_TAIL_BYTES = 16_384
_STOP_SECONDS = 15.0
LOOPBACK = "127.0.0.1"


class VLLMProcess(Protocol):
    """A server that was started for this run."""

    log: Path
    ended: asyncio.Future[EngineError]
    """Done when it has ended, with how, as an error that can be raised: BackendDied where what it ran on is gone."""

    async def last_words(self) -> str:
        """The end of what it wrote, for an error's message."""
        ...

    async def stop(self) -> None:
        """End it and all its children. Idempotent."""
        ...


class ServerProcess:
    """A `VLLMProcess`, on this machine. It ends with `stop`, by itself, or with this process, however that ends."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, began: int) -> None:
        self.log = log
        self.pid = process.pid
        self._process = process
        self._began = began
        self.ended: asyncio.Future[EngineError] = asyncio.ensure_future(self._until_ended())

    @classmethod
    async def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess:
        """What it writes is appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with open_private(log, "ab") as output:
            began = output.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", guard.__file__, *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
            )
        return cls(process, log, began)

    async def _until_ended(self) -> EngineError:
        code = await self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        if code == -signal.SIGKILL:
            how += " (the system does that when memory runs out)"
        words = await self.last_words()
        return EngineError(f"The vLLM server ended {how}.{words}\nAll that it said is in {self.log}.")

    async def stop(self) -> None:
        """See `Server.stop`."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(self.ended)
        except TimeoutError:
            pass
        finally:
            self.kill()
            await self.ended

    def kill(self) -> None:
        """End what is left of its group now."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def last_words(self) -> str:
        """See `Server.last_words`."""
        return await asyncio.to_thread(self._last_words)

    def _last_words(self) -> str:
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(self._began, file.tell() - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in _cause_last(lines)[-_WORDS:])


def _cause_last(lines: Sequence[str]) -> list[str]:
    """Without the empty lines and the arrows under a traceback's code, so that more of the cause is to be seen."""
    return [line for line in lines if line.strip(" ^~") and not line.rstrip().endswith(("^", "~"))]


def free_port(host: str = LOOPBACK) -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
