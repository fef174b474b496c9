"""What removes containers or pods when an attempt ends: a process that outlives this one, however this one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agentlightning.errors import AgentError
from agentlightning.litagent.process import Limits, run_command

_REMOVED_SECONDS = 120.0


@asynccontextmanager
async def removed_afterwards(command: Sequence[str], environment: Mapping[str, str]) -> AsyncIterator[None]:
    """Run a command that waits for a line on its stdin and then removes what there is.

    The line is "end" where all went well and "failed" where not. It is empty where this process is gone.
    """
    remover = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,
    )
    how = b"failed\n"
    try:
        yield
        how = b"end\n"
    finally:
        await asyncio.shield(_end(remover, command, environment, how))


async def _end(
    remover: asyncio.subprocess.Process, command: Sequence[str], environment: Mapping[str, str], how: bytes
) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_REMOVED_SECONDS):
            await remover.communicate(how)
            if remover.returncode != 0:  # it was ended itself, or what removes was busy
                with suppress(AgentError):
                    await run_command(command, folder=Path("/"), environment=environment, limits=Limits(), stdin=how)
