"""User ids of their own for attempts, where we are root: no two that are open at the same time are the same user.

An id is taken at random from a range that neither people nor services nor containers have, and leased while the attempt
is open: an abstract Unix socket with its number keeps it from other runners of this machine (of its network namespace),
and goes with the process that holds it. Where the kernel maps no such ids, as in many containers, all are `nobody`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentlightning.errors import ConfigError

logger = logging.getLogger(__name__)

NOBODY = 65534
IDS = range(2_010_000_000, 2_010_000_000 + 2**27)
"""Above the ids that directories of users are given (SSSD: up to 2,000,200,000), and within 31 bits."""
NAME = "attempt"
_TRIES = 1000


@contextmanager
def own_user() -> Iterator[int | None]:
    """Lease a user id, which stands for a group too. None where we are not root: then programs run as who we are."""
    if sys.platform != "linux" or os.geteuid() != 0:
        yield None
    elif not _can_have_own():
        yield NOBODY
    else:
        with leased(IDS, _delegated()) as user:
            yield user


@contextmanager
def leased(ids: range, taken: Sequence[range]) -> Iterator[int]:
    """Lease an id that is not taken. Raises ConfigError where none seems to be free."""
    with socket.socket(socket.AF_UNIX) as lease:
        for _ in range(_TRIES):
            user = secrets.choice(ids)
            if any(user in of_somebody for of_somebody in taken) or not _take(lease, user):
                continue
            yield user
            return
    raise ConfigError(
        f"No user id is left for an attempt: those from {ids[0]} to {ids[-1]} are given to others. Leave some of them "
        "out of /etc/subuid and /etc/subgid."
    )


def _take(lease: socket.socket, user: int) -> bool:
    try:
        lease.bind(f"\0agentlightning-user-{user}")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _delegated() -> list[range]:
    """The ids that users of this machine may give to containers of theirs, in which they would be one of ours."""
    return [ids for name in ("subuid", "subgid") if (file := Path("/etc", name)).is_file() for ids in ranges(file)]


def ranges(file: Path) -> Iterator[range]:
    """Ranges of a file like /etc/subuid, `somebody:first:count` in a line. What is written otherwise is left out."""
    for line in file.read_text(errors="replace").splitlines():
        numbers = line.split(":")[1:]
        if len(numbers) == 2 and all(number.strip().isdecimal() for number in numbers):
            first, count = map(int, numbers)
            yield range(first, first + count)


@functools.cache
def _can_have_own() -> bool:
    """Raises ConfigError where root of a user namespace has nobody to become."""
    if _knows(IDS):
        return True
    if not _knows(range(NOBODY, NOBODY + 1)):
        raise ConfigError(
            "You are root of a user namespace that has no other users (/proc/self/uid_map), so a program cannot run as "
            "another one. Use a user without privileges outside of it, or map ids into it."
        )
    logger.warning(
        "All attempts are the user nobody, because this user namespace (/proc/self/uid_map) does not have the ids from "
        "%d to %d: they share what the kernel gives to each user, such as a number of processes.",
        IDS[0],
        IDS[-1],
    )
    return False


def _knows(ids: range) -> bool:
    return all(is_mapped(ids, Path("/proc/self", name)) for name in ("uid_map", "gid_map"))


def is_mapped(ids: range, file: Path) -> bool:
    """Whether a file like /proc/self/uid_map has all of the ids; a kernel without one has no user namespaces."""
    lines = file.read_text().splitlines() if file.exists() else [f"0 0 {2**32 - 1}"]
    maps = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    return any(first <= ids[0] and ids[-1] < first + count for first, count in maps)


def change_owner(user: int | None, *places: Path) -> None:
    """What a program is to use belongs to the user that it runs as; what links in it lead to does not."""
    if user is None:
        return
    done = subprocess.run(
        ["chown", "-hR", f"{user}:{user}", "--", *map(str, places)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigError(
            f"Files cannot be given to the user that a program is to run as: {done.stderr.strip()[-300:]} Run it as "
            "root with CAP_CHOWN, or as a user without privileges."
        )


def write_lists(folder: Path, user: int | None) -> None:
    """Write this machine's lists of users and groups into a folder, with the user of an attempt in them."""
    if user in (None, NOBODY):
        return
    lines = {"passwd": f"{NAME}:x:{user}:{user}:{NAME}:/tmp:/bin/sh\n", "group": f"{NAME}:x:{user}:\n"}
    for name, line in lines.items():
        if (of_machine := Path("/etc", name)).is_file():
            (folder / name).write_bytes(line.encode() + of_machine.read_bytes())
            (folder / name).chmod(0o644)


def lists(folder: Path) -> list[tuple[Path, Path]]:
    """The files of this machine that those of `write_lists` stand for, each with its own."""
    return [(Path("/etc", name), folder / name) for name in ("passwd", "group") if (folder / name).is_file()]
