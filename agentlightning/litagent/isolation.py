"""Keeping a program apart from the machine: bubblewrap, or a container command of the user's.

In bubblewrap a program sees the file system read-only, can write to its working directory and /tmp (its own) only, sees
no other processes, and has no network but one way: to the host and port of its endpoint, through a Unix socket and
`relay.py`. What it may read is not hidden from it; what it reads it can tell nobody but the gateway.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from agentlightning.errors import ConfigError

RELAY = Path(__file__).with_name("relay.py")
ENDPOINTS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "AGL_REWARD_URL")
"""The variables that hold the endpoint."""


@dataclass(frozen=True, slots=True)
class Container:
    """A command that runs the program in a container, for example

        Container(["docker", "run", "--rm", "-i", "--name", "{name}", "--network", "agents", "-v",
                   "{workspace}:{workspace}", "-w", "{workspace}", "{env}", "my-image"],
                  cleanup=["docker", "rm", "-f", "{name}"])

    `{workspace}` is the working directory, `{name}` a name made for this attempt, and an argument `{env}` becomes
    `--env NAME` for each of the program's variables. The network is the command's business.
    """

    command: Sequence[str]
    cleanup: Sequence[str] | None = None
    """Run after the attempt, however it ended: a container outlives its client's death."""

    def wrap(self, command: Sequence[str], workspace: Path, environment: Mapping[str, str]) -> list[str]:
        names = [argument for name in sorted(environment) for argument in ("--env", name)]
        given = [names if a == "{env}" else [_fill(a, workspace)] for a in self.command]
        return [*(a for arguments in given for a in arguments), *command]

    async def clean(self, workspace: Path) -> None:
        if self.cleanup:
            arguments = [_fill(a, workspace) for a in self.cleanup]
            nothing = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(*arguments, stdout=nothing, stderr=nothing)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 30)


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A command with the environment it is to run in."""

    command: Sequence[str]
    environment: Mapping[str, str]


@asynccontextmanager
async def isolated(
    isolation: str | Container | None, command: Sequence[str], workspace: Path, environment: Mapping[str, str]
) -> AsyncIterator[Wrapped]:
    """The command to run instead. Raises ConfigError when bubblewrap is asked for and not there."""
    if isolation is None:
        yield Wrapped(command, environment)
    elif isinstance(isolation, Container):
        try:
            yield Wrapped(isolation.wrap(command, workspace, environment), environment)
        finally:
            await asyncio.shield(isolation.clean(workspace))
    else:
        async with _bubblewrapped(command, workspace, environment) as wrapped:
            yield wrapped


def check_isolation(isolation: str | Container | None) -> None:
    """Raises ConfigError for what cannot work here."""
    if isinstance(isolation, str) and isolation != "bubblewrap":
        raise ConfigError(f"isolation is {isolation!r}; it can be 'bubblewrap', a Container or None.")
    if isolation == "bubblewrap" and shutil.which("bwrap") is None:
        raise ConfigError("isolation='bubblewrap' needs the program bwrap. On Debian: apt-get install bubblewrap.")


@asynccontextmanager
async def _bubblewrapped(
    command: Sequence[str], workspace: Path, environment: Mapping[str, str]
) -> AsyncIterator[Wrapped]:
    with tempfile.TemporaryDirectory(prefix="agl-gateway-") as folder:  # a short path: sockets' names are limited
        relay: list[str] = []
        url = environment.get("OPENAI_BASE_URL")
        server = None
        if url is not None:
            socket = f"{folder}/gateway"
            host, port = _address(url)
            server = await asyncio.start_unix_server(_pump_to(host, port), socket)
            relay = [sys.executable, "-I", "-S", str(RELAY), socket, str(port)]
            local = {name: _local(environment[name]) for name in ENDPOINTS if name in environment}
            environment = {**environment, **local}
        try:
            yield Wrapped([*_bubblewrap(command, workspace, Path(folder)), *relay, *command], environment)
        finally:
            if server is not None:
                server.close()


def _bubblewrap(command: Sequence[str], workspace: Path, folder: Path) -> list[str]:
    needed = {str(Path(a).parent) for a in command if os.path.isfile(a)}
    read_only = needed | {str(RELAY.parent), sys.prefix, sys.base_prefix}  # they may lie in the /tmp it does not see
    binds = [argument for place in sorted(read_only) for argument in ("--ro-bind", place, place)]
    return [
        *("bwrap", "--unshare-all", "--die-with-parent"),
        *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp"),
        *binds,
        *("--bind", str(workspace), str(workspace), "--bind", str(folder), str(folder)),
        *("--chdir", str(workspace), "--"),
    ]


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ConfigError(f"A program in bubblewrap reaches its endpoint over plain http only, not {url}.")
    return parts.hostname, parts.port or 80


def _local(url: str) -> str:
    return urlsplit(url)._replace(netloc=f"127.0.0.1:{_address(url)[1]}").geturl()


def _pump_to(host: str, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer), return_exceptions=True)

    return serve


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


def _fill(argument: str, workspace: Path) -> str:
    return argument.replace("{workspace}", str(workspace)).replace("{name}", f"agl-{workspace.name}")
