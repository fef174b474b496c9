"""A sandbox of bubblewrap: what a program sees of this machine, and the user that it runs as.

It sees the system's programs, its interpreter and its own folder, all read-only; its working directory and a `/tmp`
that ends with it are all it can write. It holds no capability, sees no process, socket or network of the host, and
reaches one address: its endpoint, through a Unix socket and `relay.py`. Where we are root, it becomes a user of
its own. `check_bubblewrap` tries all of that out before the first program runs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError
from agentlightning.litagent import users, view
from agentlightning.net.descriptors import file_descriptors

INSIDE = Path(__file__).with_name("relay.py")
PROBE = Path(__file__).with_name("probe.py")
ENDPOINTS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL", "AGL_REWARD_URL")
"""The variables that hold the endpoint."""
SOCKETS = "/run/agl"
"""Where the sandbox has the folder with the gateway's socket."""
_FILES_PER_CONNECTION = 8
"""A connection takes two file descriptors here, so sandboxes have a quarter of them."""


@explained_class
@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A sandbox made by bubblewrap, with more to read than what a program gets by itself.

        Program("node agent.js", isolation=Bubblewrap(read=["/data/pages"]))

    Each folder or file of `read` is seen read-only, at the same path, without the sockets, named pipes and stores that
    a folder holds. A socket that is to be reached is named itself.
    """

    read: Sequence[str | Path] = ()
    """Further folders and files to see."""
    memory_files: int | None = None
    """Where given, nothing is written to a disk: the working directory, `/tmp` and `/dev/shm` are in memory, and each
    holds so many bytes."""
    binds: Mapping[str, Path] = field(default_factory=dict)
    """Folders of an attempt that are seen somewhere else, and written there: by where they are seen. They lie outside
    of the working directory, in which a program could put a link in their place."""

    def arguments(
        self, command: Sequence[str], folder: Path, readable: Sequence[Path] = (), own: Path | None = None
    ) -> list[str]:
        """The command line up to the command: `folder` is the writable working directory, `own` has the gateway's
        socket and the lists of users.
        """
        seen = view.of_command(command) | view.of_python() | {_existing(place) for place in self.read}
        others = view.others((folder, *readable), seen)
        covers = [cover for place in seen for cover in view.covers(place)]
        mounts = {place: cover for place, cover in covers if not any(place.is_relative_to(p) for p in others)}
        mounts |= {place: view.shown(place) for place in seen}
        mounts |= {place: ["--tmpfs", str(place)] for place in others}
        size = [] if self.memory_files is None else ["--size", str(self.memory_files)]
        tmpfs = ["--perms", "1777", *size, "--tmpfs"]
        mounts[folder] = [*tmpfs, str(folder)] if size else ["--bind", str(folder), str(folder)]
        mounts |= {place: ["--ro-bind", str(place), str(place)] for place in readable}
        mounts |= {Path(place): ["--bind", str(own_folder), place] for place, own_folder in self.binds.items()}
        if own:
            mounts[Path(SOCKETS)] = ["--ro-bind", str(own), SOCKETS]
            mounts |= {place: ["--ro-bind", str(file), str(place)] for place, file in users.lists(own)}
        above = {parent for place in mounts for parent in place.parents[:-1]} - set(mounts)
        mounts |= {place: ["--perms", "0755", "--dir", str(place)] for place in above}
        return [
            *(shutil.which("bwrap") or "bwrap", "--die-with-parent", *_namespaces()),
            *view.system(),
            *("--proc", "/proc", "--dev", "/dev", *tmpfs, "/dev/shm"),
            *(*tmpfs, "/tmp"),
            *(argument for place in sorted(mounts) for argument in mounts[place]),  # folders before what lies in them
            *("--remount-ro", "/", "--"),
        ]


@dataclass(frozen=True, slots=True)
class Wrapped:
    """A command with the environment it is to run in."""

    command: Sequence[str]
    environment: Mapping[str, str]


@asynccontextmanager
async def bubblewrapped(
    sandbox: Bubblewrap,
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    readable: Sequence[Path] = (),
    left: Path | None = None,
) -> AsyncIterator[Wrapped]:
    """The command in the sandbox; while this is open, the endpoint in its environment is reached from there.

    `left` is a working directory of a program that has ended, to be read.
    """
    environment = {**environment, "HOME": "/tmp", "TMPDIR": "/tmp"}
    url = environment.get("OPENAI_BASE_URL")
    # A short path: sockets' names are limited.
    with users.own_user() as user, tempfile.TemporaryDirectory(prefix="agl-gateway-") as name:
        own = Path(name)
        users.write_lists(own, user)
        inside, server = _inside(folder, user, "-"), None
        if url is not None:
            host, port = _address(url)
            server = await asyncio.start_unix_server(Passage(host, port), f"{own}/gateway")
            inside = _inside(folder, user, str(port))
            environment |= {name: _local(environment[name]) for name in ENDPOINTS if name in environment}
        try:
            given = (own, folder, left, *sandbox.binds.values())
            await asyncio.to_thread(users.change_owner, user, *(place for place in given if place))
            seen = [*readable, *([left] if left else [])]
            made = await asyncio.to_thread(sandbox.arguments, command, folder, seen, own)
            yield Wrapped([*made, *inside, *command], environment)
        finally:
            if server is not None:
                server.close()


@functools.cache
def check_bubblewrap() -> None:
    """Try the sandbox out. Raises ConfigError when it cannot be made here, or does not hold what it promises."""
    if shutil.which("bwrap") is None:
        raise ConfigError("isolation='bubblewrap' needs the program bwrap. On Debian: apt-get install bubblewrap.")
    with ExitStack() as stack:
        secret, folder, shown = [stack.enter_context(tempfile.TemporaryDirectory(prefix="agl-probe-")) for _ in "123"]
        bait = stack.enter_context(_listening_in(Path(shown)))
        user = stack.enter_context(users.own_user())
        users.change_owner(user, Path(folder))
        probe = [sys.executable, "-I", "-S", str(PROBE), secret, bait]
        made = Bubblewrap(read=[shown]).arguments(probe, Path(folder))
        command = [*made, *_inside(Path(folder), user, "-"), *probe]
        done = subprocess.run(command, capture_output=True, text=True, env={}, timeout=60, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"bubblewrap makes no sandbox here: {done.stderr.strip()[-500:]} It needs user namespaces, or root with "
            "CAP_SYS_ADMIN; elsewhere give a container command (isolation=Container(…))."
        )
    broken = json.loads(done.stdout)
    if broken:
        raise ConfigError(
            f"bubblewrap's sandbox does not hold here: {'; '.join(broken)}. Give a container command "
            "(isolation=Container(…)), or run as a user without privileges."
        )


@contextmanager
def _listening_in(folder: Path) -> Iterator[str]:
    """A socket of the host in a folder of a folder, for everybody."""
    folder.chmod(0o755)
    (folder / "deep").mkdir()
    with socket.socket(socket.AF_UNIX) as listening:
        path = str(folder / "deep" / "socket")
        listening.bind(path)
        os.chmod(path, 0o666)
        listening.listen()
        yield path


def _namespaces() -> list[str]:
    """As root there is no user namespace: in one, uid 0 outside would still own /proc/sys. `relay.py` gives root up.

    Further user namespaces are refused by `relay.py`, and otherwise by bubblewrap where it and the kernel can.
    """
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        return [*apart, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    can = "--disable-userns" in view.bubblewrap_help() and os.path.exists("/proc/sys/user/max_user_namespaces")
    return [*apart, "--unshare-user", *(["--disable-userns"] if can else [])]


def _inside(folder: Path, user: int | None, port: str) -> list[str]:
    becomes = "-" if user is None else str(user)
    return [sys.executable, "-I", "-S", str(INSIDE), becomes, str(folder), f"{SOCKETS}/gateway", port]


def _existing(place: str | Path) -> Path:
    path = Path(place).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"Bubblewrap(read=…) names '{place}', which is not there.")
    return path


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None:
        raise ConfigError(f"A program in bubblewrap reaches its endpoint over plain http only, not {url}.")
    return parts.hostname, parts.port or 80


def _local(url: str) -> str:
    return urlsplit(url)._replace(netloc=f"127.0.0.1:{_address(url)[1]}").geturl()


class Passage:
    """Passes the connections of one sandbox on to its endpoint.

    All sandboxes together have so many, and each at most as many as it leaves free: none takes all of them.
    """

    _all = 0

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._own = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._own >= file_descriptors() // _FILES_PER_CONNECTION - Passage._all:
            writer.close()
            return
        self._own, Passage._all = self._own + 1, Passage._all + 1
        try:
            to_reader, to_writer = await self.reached(reader, writer)
            await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer), return_exceptions=True)
        except OSError:
            pass
        finally:
            writer.close()
            self._own, Passage._all = self._own - 1, Passage._all - 1

    async def reached(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Where a connection leads. Raises OSError where it leads nowhere."""
        return await asyncio.open_connection(*self._address)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
