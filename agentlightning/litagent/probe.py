"""Inside a sandbox: `probe.py SECRET BAIT` prints as JSON which promises of the sandbox do not hold.

SECRET is a folder of the host that is not to be seen; BAIT is a socket of the host, deep in a folder that is.

Only the standard library, and nothing of the package: it is started with `python -I -S`.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator

SETTINGS = ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/overcommit_memory", "/proc/sysrq-trigger")
CLONE_NEWUSER = 0x10000000


def writable(path: str) -> bool:
    """Opening writes nothing."""
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError:
        return False
    return True


def sockets(place: str) -> Iterator[str]:
    for folder, _, files in os.walk(place):
        for name in files:
            path = os.path.join(folder, name)
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                yield path


def process() -> Iterator[str]:
    """What this process may do."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    if 0 in os.getresuid() + os.getresgid():
        yield "the program is root"
    if any(int(status[kind], 16) for kind in ("CapInh", "CapPrm", "CapEff", "CapAmb")):
        yield "the program has capabilities"
    if status["NoNewPrivs"].strip() != "1":
        yield "the program can gain privileges"

    keyctl = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
    if keyctl is None or ctypes.CDLL(None).syscall(keyctl, 0, -4, 1) != -1:
        yield "the program can use the user's keyring, which all attempts share"
    if ctypes.CDLL(None).unshare(CLONE_NEWUSER) == 0:
        yield "the program can make user namespaces, in which it is root (a kernel with seccomp would prevent it)"


def connects(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(path)
        except OSError:
            return False
    return True


def surroundings(secret: str, bait: str) -> Iterator[str]:
    """What it can reach."""
    yield from (f"{path} can be written" for path in SETTINGS if writable(path))
    yield from (f"the socket {path} is reachable" for place in ("/run", "/tmp") for path in sockets(place))
    if connects(bait):
        yield "a socket deep in a folder that is shown is reachable"
    if os.path.exists("/nix/var"):
        yield "the socket of Nix's daemon is seen"
    if os.path.exists(secret):
        yield f"{secret} of the host is seen"
    if not all(os.statvfs(place).f_flag & os.ST_RDONLY for place in ("/", "/usr", "/etc")):
        yield "the system's files can be written"
    with open("/proc/1/comm") as file:
        if file.read().strip() != "bwrap":
            yield "processes of the host are seen"
    with open("/proc/net/dev") as file:
        names = [line.split(":")[0].strip() for line in file if ":" in line]
    yield from (f"the network interface {name} is there" for name in names if name != "lo")


if __name__ == "__main__":
    print(json.dumps([*surroundings(*sys.argv[1:]), *process()]))  # noqa: T201
