"""A sandbox of bubblewrap: what a program sees of this machine, and as whom it runs.

It sees the system's programs, its interpreter and its own folder, all read-only; its working directory and a `/tmp`
that ends with it are all it can write. It holds no capability, sees no process, socket or network of the host, and
reaches one address: its endpoint, through a Unix socket and `relay.py`. Where we are root, it becomes nobody.
`check_bubblewrap` tries all of that out before the first program runs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentlightning.arguments import explained_class
from agentlightning.descriptors import file_descriptors
from agentlightning.errors import ConfigError

INSIDE = Path(__file__).with_name("relay.py")
PROBE = Path(__file__).with_name("probe.py")
ENDPOINTS = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "AGL_REWARD_URL")
"""The variables that hold the endpoint."""
SOCKETS = "/run/agl"
"""Where the sandbox has the folder with the gateway's socket."""
NOBODY = 65534
_FILES_PER_CONNECTION = 8
"""A connection takes two file descriptors here, so sandboxes have a quarter of them."""
SYSTEM = ("/usr", "/etc", "/nix")
ALIASES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders on old systems, links into /usr on new ones."""


@explained_class
@dataclass(frozen=True, slots=True)
class Bubblewrap:
    """A sandbox made by bubblewrap, with more to read than what a program gets by itself.

        Program("node agent.js", isolation=Bubblewrap(read=["/data/pages"]))

    Each folder or file of `read` is seen read-only, at the same path. Sockets below a folder can be connected to: give
    none that holds one of another program's.
    """

    read: Sequence[str | Path] = ()
    """Further folders and files to see."""

    def arguments(
        self, command: Sequence[str], folder: Path, readable: Sequence[Path] = (), sockets: Path | None = None
    ) -> list[str]:
        """The command line up to the command: `folder` is the writable working directory."""
        mounts = {place: ["--ro-bind", str(place), str(place)] for place in self._seen(command)}
        mounts |= {place: cover for seen in list(mounts) for place, cover in _covers(seen)}
        mounts |= {others: ["--tmpfs", str(others)] for others in _others((folder, *readable), mounts)}
        mounts[folder] = ["--bind", str(folder), str(folder)]
        mounts |= {place: ["--ro-bind", str(place), str(place)] for place in readable}
        if sockets:
            mounts[Path(SOCKETS)] = ["--ro-bind", str(sockets), SOCKETS]
        above = {parent for place in mounts for parent in place.parents[:-1]} - set(mounts)
        mounts |= {place: ["--perms", "0755", "--dir", str(place)] for place in above}
        return [
            *(shutil.which("bwrap") or "bwrap", "--die-with-parent", *_namespaces()),
            *_system(),
            *("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/dev/shm"),
            *("--perms", "1777", "--tmpfs", "/tmp"),
            *(argument for place in sorted(mounts) for argument in mounts[place]),  # folders before what lies in them
            *("--remount-ro", "/", "--"),
        ]

    def _seen(self, command: Sequence[str]) -> set[Path]:
        return _of_command(command) | _of_python() | {_existing(place) for place in self.read}


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
) -> AsyncIterator[Wrapped]:
    """The command in the sandbox; while this is open, the endpoint in its environment is reached from there."""
    _give_away(folder)
    environment = {**environment, "HOME": "/tmp", "TMPDIR": "/tmp"}
    url = environment.get("OPENAI_BASE_URL")
    if url is None:
        yield Wrapped([*sandbox.arguments(command, folder, readable), *_inside(folder, "-"), *command], environment)
        return
    host, port = _address(url)
    local = {name: _local(environment[name]) for name in ENDPOINTS if name in environment}
    with tempfile.TemporaryDirectory(prefix="agl-gateway-") as sockets:  # a short path: sockets' names are limited
        server = await asyncio.start_unix_server(Passage(host, port), f"{sockets}/gateway")
        _give_away(Path(sockets))
        try:
            wrapped = [
                *sandbox.arguments(command, folder, readable, Path(sockets)),
                *_inside(folder, str(port)),
                *command,
            ]
            yield Wrapped(wrapped, {**environment, **local})
        finally:
            server.close()


@functools.cache
def check_bubblewrap() -> None:
    """Try the sandbox out. Raises ConfigError when it cannot be made here, or does not hold what it promises."""
    if shutil.which("bwrap") is None:
        raise ConfigError("isolation='bubblewrap' needs the program bwrap. On Debian: apt-get install bubblewrap.")
    with tempfile.TemporaryDirectory(prefix="agl-probe-") as secret, tempfile.TemporaryDirectory() as folder:
        _give_away(Path(folder))
        probe = [sys.executable, "-I", "-S", str(PROBE), secret]
        command = [*Bubblewrap().arguments(probe, Path(folder)), *_inside(Path(folder), "-"), *probe]
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


def _namespaces() -> list[str]:
    """As root there is no user namespace: in one, uid 0 outside would still own /proc/sys. `relay.py` gives root up."""
    apart = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() == 0:
        return [*apart, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*apart, "--unshare-user", *(["--disable-userns"] if "--disable-userns" in _help() else [])]


@functools.cache
def _help() -> str:
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout


def _inside(folder: Path, port: str) -> list[str]:
    user = str(NOBODY) if os.geteuid() == 0 else "-"
    return [sys.executable, "-I", "-S", str(INSIDE), user, str(folder), f"{SOCKETS}/gateway", port]


def _give_away(folder: Path) -> None:
    """What the program is to use belongs to whom it runs as."""
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def _system() -> Iterator[str]:
    for place in (*SYSTEM, *ALIASES):
        if os.path.islink(place):
            yield from ("--symlink", os.readlink(place), place)
        elif os.path.isdir(place):
            yield from ("--ro-bind", place, place)


def _of_python() -> set[Path]:
    return {INSIDE.parent, Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}


def _of_command(command: Sequence[str]) -> set[Path]:
    """The folders of the files it names, and where its program is installed."""
    program = shutil.which(command[0]) or command[0]
    installed = {_installation(Path(p)) for p in (program, os.path.realpath(program)) if os.path.isfile(p)}
    named = {_folder(Path(a)) for a in command[1:] if os.path.isabs(a) and os.path.isfile(a)}
    return {p for p in installed | named if not any(p.is_relative_to(s) for s in (*SYSTEM, *ALIASES, "/dev", "/proc"))}


def _installation(program: Path) -> Path:
    folder = program.parent
    whole = folder.parent if folder.name == "bin" else folder
    return program if whole in _shared() else whole


def _folder(file: Path) -> Path:
    return file if file.parent in _shared() else file.parent


def _shared() -> set[Path]:
    """Folders that hold much besides a program: of them it sees its own file only."""
    home = Path.home()
    return {Path("/"), home, home / ".local", Path(tempfile.gettempdir()), Path("/tmp")}


def _existing(place: str | Path) -> Path:
    path = Path(place).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"Bubblewrap(read=…) names '{place}', which is not there.")
    return path


def _others(folders: Sequence[Path], seen: Mapping[Path, Any]) -> set[Path]:
    """Where other attempts have their folders, if it would be seen."""
    places = {folder.parent for folder in folders if any(folder.is_relative_to(place) for place in seen)}
    for place in places & set(seen):
        raise ConfigError(
            f"Working directories in {place}, where the program lies, would be seen by other attempts: "
            "give a folder of their own (workspaces=…)."
        )
    return places


def _covers(place: Path) -> Iterator[tuple[Path, list[str]]]:
    """What lies beside a program and is none of its business: sockets, stores, and the folders of runs."""
    if not place.is_dir():
        return
    for entry in os.scandir(place):
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            if entry.name == "runs" or (path / "store.db").exists():
                yield path, ["--tmpfs", entry.path]
        elif stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) or entry.name.startswith("store.db"):
            yield path, ["--ro-bind", "/dev/null", entry.path]


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
            to_reader, to_writer = await asyncio.open_connection(*self._address)
            await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer), return_exceptions=True)
        except OSError:
            pass
        finally:
            writer.close()
            self._own, Passage._all = self._own - 1, Passage._all - 1


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()
