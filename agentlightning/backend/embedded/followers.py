"""The further ranks of a learner, as rank 0 has them: processes started here, or ones that wait on other machines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from agentlightning.backend.embedded.protocol import SocketAddress
from agentlightning.errors import EngineError

_REACH_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Follower:
    """One of them."""

    sock: socket.socket
    wait: Callable[[], str]
    """Returns when it has ended; who it was and how it ended."""


def start_here() -> Follower:
    """A process of this machine, which ends with this one."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentlightning.backend.embedded.rank", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def wait() -> str:
        code = process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"(process {process.pid}) ended {how}"

    return Follower(ours, wait)


def reach(address: SocketAddress) -> Follower:
    """One that waits at an address. Raises EngineError where nobody does."""
    try:
        sock = socket.create_connection((address.host, address.port), timeout=_REACH_SECONDS)
    except OSError as error:
        raise EngineError(f"The learner's rank at {address.host}:{address.port} cannot be reached: {error}.") from error
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Between two steps nothing is sent; a machine that is gone must be noticed all the same.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.sendall(address.key.encode())

    def wait() -> str:
        try:
            while sock.recv(1 << 12):
                pass  # it says nothing
        except OSError:
            pass
        return f"(at {address.host}:{address.port}) is gone"

    return Follower(sock, wait)


def exit_now() -> NoReturn:
    """End this process without a word to those who wait in the middle of a pass."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
