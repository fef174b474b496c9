"""`python guard.py COMMAND …`: runs a command, and ends it with all its children when the standard input ends.

A vLLM server has processes of its own that outlive it when it is killed, and it would outlive us. The guard leads their
process group; its standard input is a pipe that only our process holds, so however that one ends, they do too. It is a
child of the process that was started, which only passes its end on: Ray kills the children of an actor that it ends,
and after a guard that was killed nobody would end the group. Uses nothing but the standard library.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 5.0


def main(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_the_parent, args=[child], daemon=True).start()
    return child.wait()


def _end_with_the_parent(child: subprocess.Popen[bytes]) -> None:
    while os.read(0, 1024):
        pass
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()


def _end_the_group(code: int) -> None:
    """Nothing of the command goes on. The last thing that happens here: this process is of the group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    _end_likewise(code)


def _pass_on(guard: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # that is for the others of the group
    _end_likewise(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))


def _end_likewise(code: int) -> None:
    """By the same signal or with the same exit code, so that whoever waits for us can tell."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for our process alone
    if child := os.fork():
        _pass_on(child)
    _end_the_group(main(sys.argv[1:]))
