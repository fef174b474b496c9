"""Whether the attempts of a program share the folder that they work in, as far as its command says.

Each attempt has a working directory of its own, and a command may leave it: for a folder that is named, for a container
that runs already, for another machine. What a program writes elsewhere besides cannot be known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

_SHELLS = frozenset({"sh", "bash", "dash", "zsh", "ksh", "ash"})
_ENGINES = frozenset({"docker", "podman", "nerdctl", "finch"})
_EXEC_PROGRAMS = _ENGINES | {"kubectl", "oc", "lxc", "incus"}
"""Programs whose `exec` runs a command in a container that is there already."""
_LEAVES = re.compile(r"(?:^|[\s;&|({])(?:cd|pushd)\s+(?:--\s+)?[\"']?((?:/|~|\$\{?HOME\b)[^\s;&|\"')]*)")
"""`cd` in a shell's script to a place that is the same for all attempts."""
_PLACE = "{workspace}"


class _Mount(NamedTuple):
    """A folder or a volume that a container sees."""

    source: str
    target: str
    read_only: bool

    @property
    def is_of_attempt(self) -> bool:
        """Whether it is the working directory of one attempt, which relative paths begin at, or in memory."""
        return not self.source or self.source.startswith(".") or _PLACE in self.source


def shared_outside(command: Sequence[str]) -> str | None:
    """Why attempts of a program that runs without isolation share a folder, and what to do; None if nothing says so."""
    program, *rest = _without_env(command)
    name = PurePosixPath(program).name
    folder = _folder_of_env(command)
    if name in _SHELLS:
        scripts = [text for text in rest if _LEAVES.search(text)]
        folder = folder or next((found[1] for text in scripts if (found := _LEAVES.search(text))), None)
    if folder is not None:
        return (
            f"The program works in {folder}, which all its attempts share. Give it a copy of its own: files={folder!r} "
            "(--files), and begin in the working directory."
        )
    if name == "ssh" or (name in _EXEC_PROGRAMS and "exec" in rest):
        return (
            f"The program runs by '{name}' in a place that all its attempts share. Start one for each attempt: "
            "isolation=agl.Container(['docker', 'run', '--rm', …]), or 'bubblewrap' (--isolation)."
        )
    if name in _ENGINES and "run" in rest:
        return _shared_in_new_container(rest)
    return None


def shared_in_container(command: Sequence[str]) -> str | None:
    """The same of a program that runs in a container: `command` is that of `Container`."""
    program, *rest = command
    if PurePosixPath(program).name in _ENGINES and "run" in rest:
        return _shared_in_new_container(rest)
    if any(_PLACE in argument for argument in rest):
        return None
    return (
        f"The container's command, {program} …, does not name {{workspace}}, so that all attempts may work in the same "
        "place. Start a container for each attempt (docker run --rm …), or begin in {workspace} (-w {workspace})."
    )


def _shared_in_new_container(arguments: Sequence[str]) -> str | None:
    """A new container has a fresh copy of its image, but for the folders of this machine that are mounted in it."""
    begins = next(_values(arguments, ("-w", "--workdir")), None)
    mounts = [_mount(text) for text in _values(arguments, ("-v", "--volume", "--mount"))]
    if begins is not None:
        above = [mount for mount in mounts if PurePosixPath(begins).is_relative_to(mount.target)]
        mounts = sorted(above, key=lambda mount: len(mount.target))[-1:]
    elif any(mount.is_of_attempt for mount in mounts):
        return None
    shared = [mount for mount in mounts if not (mount.is_of_attempt or mount.read_only)]
    if not shared:
        return None
    return (
        f"The container works in {shared[0].source}, which is mounted for all attempts. Mount the attempt's own folder "
        "in its place (-v {workspace}:{workspace} -w {workspace}), with a copy of its files: files=… (--files)."
    )


def _mount(text: str) -> _Mount:
    """As `-v` takes it (SOURCE:TARGET:OPTIONS), or `--mount` (type=bind,src=…,dst=…,readonly)."""
    if "=" not in text.partition(":")[0]:
        source, _, rest = text.partition(":")
        target, _, options = rest.partition(":")
        return _Mount(source if target else "", target or source, "ro" in options.split(","))
    given = {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
    source, target = (next((given[k] for k in keys if k in given), "") for keys in (_SOURCES, _TARGETS))
    read_only = any(given.get(key, "false") in ("", "true", "1") for key in ("readonly", "ro"))
    return _Mount("" if given.get("type") == "tmpfs" else source, target, read_only)


_SOURCES, _TARGETS = ("source", "src"), ("target", "dst", "destination")


def _values(arguments: Sequence[str], options: Sequence[str]) -> Iterator[str]:
    """What is given to these options: behind them, or behind a sign of equality."""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if name in options:
            yield value if equals else following


def _without_env(command: Sequence[str]) -> Sequence[str]:
    """The command behind `env`, its variables and its options."""
    if PurePosixPath(command[0]).name != "env":
        return command
    rest = list(command[1:])
    while rest and (rest[0].startswith("-") or "=" in rest[0]):
        del rest[: 2 if rest[0] in ("-C", "-u", "--chdir", "--unset") else 1]
    return rest or command


def _folder_of_env(command: Sequence[str]) -> str | None:
    """Where `env` lets the command begin."""
    if PurePosixPath(command[0]).name != "env":
        return None
    before = command[: len(command) - len(_without_env(command))]
    return next(_values(before, ("-C", "--chdir")), None)
