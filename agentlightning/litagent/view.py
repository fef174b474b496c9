"""What a sandbox shows of this machine, read-only: the system's programs, the interpreters, a command's files.

A folder is shown through a layer of the attempt's own, where bubblewrap (0.11) and the kernel can: locks, watches,
pipes and sockets of its files are then not those of other attempts.

What lies among these and is none of a program's business is covered, however deep: sockets, named pipes and devices,
stores, and the folders of runs. It is looked for when a sandbox is made: with a command each time, in interpreters once
and then, as in the system's folders, among the sockets that the kernel tells.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from agentlightning.errors import ConfigError

SYSTEM = ("/usr", "/etc", "/nix/store")
ALIASES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
"""Folders on old systems, links into /usr on new ones."""
OF_MANY = ("/", "/boot", "/home", "/media", "/mnt", "/nix", "/opt", "/root", "/run", "/snap", "/srv", "/tmp", "/var")
"""Folders that hold much besides one program."""
OF_MANY_BELOW = ("/home", "/run", "/var")
"""Of these, the folders right below too."""
OWN = Path(__file__).parent

Mount = list[str]


def system() -> Iterator[str]:
    """The arguments that show the system's own folders."""
    for place in (*SYSTEM, *ALIASES):
        if os.path.islink(place):
            yield from ("--symlink", os.readlink(place), place)
        elif os.path.isdir(place):
            yield from shown(Path(place))
            for path in _listening_in(Path(place)):
                yield from _cover(path)


def shown(place: Path) -> Mount:
    """The arguments that show a file or a folder, read-only."""
    path = str(place)
    if not (place.is_dir() and _layered(path)):
        return ["--ro-bind", path, path]
    below = [argument for mount in _mounts_below(path) for argument in ("--ro-bind", mount, mount)]
    return ["--overlay-src", path, "--tmp-overlay", path, *below, "--remount-ro", path]


@cache
def _layered(path: str) -> bool:
    """Whether a layer can be made over this folder; some file systems take none."""
    if "--tmp-overlay" not in bubblewrap_help():
        return False
    tried = ["bwrap", "--ro-bind", "/", "/", "--overlay-src", path, "--tmp-overlay", path, "--remount-ro", path, "true"]
    return subprocess.run(tried, capture_output=True, check=False).returncode == 0


@cache
def bubblewrap_help() -> str:
    return subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False).stdout


def _mounts_below(path: str) -> list[str]:
    """What is mounted in a folder, which a layer over it does not show."""
    with open("/proc/self/mountinfo", errors="surrogateescape") as file:
        points = {re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), line.split()[4]) for line in file}
    return sorted(point for point in points if point.startswith(f"{path}/") and os.path.exists(point))


def of_python() -> set[Path]:
    return {OWN, Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}


def of_command(command: Sequence[str]) -> set[Path]:
    """The folders of the files it names, and where its program is installed."""
    program = shutil.which(command[0]) or command[0]
    installed = {installation_of(Path(p)) for p in (program, os.path.realpath(program)) if os.path.isfile(p)}
    named = {folder_of(Path(a)) for a in command[1:] if os.path.isabs(a) and os.path.isfile(a)}
    return {p for p in installed | named if not any(p.is_relative_to(s) for s in (*SYSTEM, *ALIASES, "/dev", "/proc"))}


def installation_of(program: Path) -> Path:
    """What is seen of a program: its installation, or its file alone where that has no folder of its own."""
    whole = program.parent.parent if program.parent.name == "bin" else program.parent
    return program if _is_shared(whole) else whole


def folder_of(file: Path) -> Path:
    """What is seen of a file that a command names: its folder, or itself alone in a folder of many things."""
    return file if _is_shared(file.parent) else file.parent


def _is_shared(place: Path) -> bool:
    """Whether a folder holds much besides a program: of it a program sees its own file only."""
    home = Path.home()
    shared = {home, *home.parents, home / ".local", Path(tempfile.gettempdir()), *map(Path, OF_MANY)}
    return place in shared or str(place.parent) in OF_MANY_BELOW


def others(folders: Sequence[Path], seen: Collection[Path]) -> set[Path]:
    """Where other attempts have their folders, if it would be seen."""
    places = {folder.parent for folder in folders if any(folder.is_relative_to(place) for place in seen)}
    for place in places & set(seen):
        raise ConfigError(
            f"Working directories in {place}, where the program lies, would be seen by other attempts: "
            "give a folder of their own (workspaces=…)."
        )
    return places


class _Listing(NamedTuple):
    changed: int
    """When the folder was changed, in nanoseconds."""
    folders: list[str]
    covers: list[Mount]


_listings: dict[str, _Listing] = {}
"""Of every folder that was looked through. One that has not changed since is not listed again."""
_TICK_NS = 10**9
"""What was changed so short a time ago may change once more at the same time, by the file system's clock."""


def covers(place: Path) -> Iterator[tuple[Path, Mount]]:
    """Mounts over what lies in a folder that is seen and is none of a program's business."""
    if place in of_python():
        yield from _installed(place)
        yield from ((Path(path), _cover(path)) for path in _listening_in(place))
    elif place.is_dir():
        yield from _look_through(place)


@cache
def _installed(place: Path) -> list[tuple[Path, Mount]]:
    return list(_look_through(place))


def _look_through(place: Path) -> Iterator[tuple[Path, Mount]]:
    top = _look(str(place))
    runs = {path for path in top.folders if path.endswith("/runs") or os.path.exists(f"{path}/store.db")}
    yield from ((Path(path), ["--tmpfs", path]) for path in runs)
    waiting = [top]
    while waiting:
        found = waiting.pop()
        yield from ((Path(cover[-1]), cover) for cover in found.covers)
        waiting += [_look(path) for path in found.folders if path not in runs]


def _look(place: str) -> _Listing:
    """A folder's folders, and the covers of what else is in it. What may be entered but not listed is covered whole."""
    try:
        changed = os.stat(place).st_ctime_ns
        if (known := _listings.get(place)) is not None and known.changed == changed:
            return known
        found = _listing(place, changed)
    except PermissionError:
        return _Listing(0, [], [["--tmpfs", place]])
    except OSError:  # it has gone meanwhile
        return _Listing(0, [], [])
    if changed < time.time_ns() - _TICK_NS:
        _listings[place] = found
    return found


def _listing(place: str, changed: int) -> _Listing:
    found = _Listing(changed, [], [])
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.folders.append(entry.path)
            elif entry.name.startswith("store.db") or not (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                found.covers.append(_cover(entry.path))
    return found


def _cover(path: str) -> Mount:
    return ["--ro-bind", "/dev/null", path]


def _listening_in(place: Path) -> list[str]:
    """The Unix sockets in a folder, as far as the kernel tells their paths."""
    try:
        with open("/proc/net/unix", errors="surrogateescape") as file:
            rows = [line.rstrip("\n").split(maxsplit=7) for line in file]
    except OSError:
        return []
    paths = {row[7] for row in rows if len(row) == 8}
    return [path for path in paths if path.startswith(f"{place}/") and os.path.exists(path)]
