"""`adopter.py COMMAND…` runs a command, adopts all processes that it leaves behind, and ends them with it.

A process whose parent is gone becomes a child of the nearest subreaper (Linux), whatever its group and its environment.
The exit status is the command's; a signal that ended it ends this process too.

Only the standard library, and nothing of the package: it is started with `python -I -S`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
FOR_THE_COMMAND = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of the whole group. A handler, unlike SIG_IGN, does not outlive the start of the command."""
DEADLINE = 5.0
"""Seconds after which a process that cannot be ended, as one of another user's, is left to the runner."""


def children() -> list[int]:
    """The processes whose parent this one is."""
    own, found = str(os.getpid()), []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


def end_children() -> None:
    """End every child. Theirs become children of this process, and are next."""
    end = time.monotonic() + DEADLINE
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
            for pid in children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)


def run(command: list[str]) -> int:
    """The command's status, as `wait` gives it. Orphans that end before it are forgotten."""
    pid = os.fork()
    if pid == 0:
        os.execvp(command[0], command)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # the pipes are the command's
        os.dup2(null, stream)
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            return status


def main() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in FOR_THE_COMMAND:
        signal.signal(number, lambda *_: None)
    code = os.waitstatus_to_exitcode(run(sys.argv[1:]))
    end_children()
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
