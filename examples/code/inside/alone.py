"""Runs inside the sandbox: becomes the given command, which may have threads and start no process.

`python -I -S alone.py node judge.mjs`. The kernel refuses processes by seccomp(2), and not by a limit of their number
(RLIMIT_NPROC): that counts threads too, and those of all sandboxes of a user together.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

# seccomp(2), linux/filter.h, and where a system call's description has what a filter looks at
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, EQUAL, HAS_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
CLONE_THREAD, CLONE3 = 0x00010000, 435
KINDS = {
    "x86_64": (0xC000003E, 56, (57, 58)),
    "aarch64": (0xC00000B7, 220, ()),
}
"""Of each machine: its architecture, and the numbers of clone and of the calls that make nothing but processes.
The calls of a third kind of x86 programs are refused by the sandbox already.
"""


def processes_refused(architecture: int, clone: int, others: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """A filter: code, jump if so, jump if not, value. clone3, whose flags it cannot see, is said not to be there; the
    C library then takes clone.
    """
    start = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE | errno.EPERM)]
    refused = [step for call in others for step in ((EQUAL, 0, 1, call), (RETURN, 0, 0, REFUSE | errno.EAGAIN))]
    return [
        *start,
        (LOAD, 0, 0, NUMBER),
        *refused,
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (EQUAL, 1, 0, clone),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (HAS_BITS, 1, 0, CLONE_THREAD),
        (RETURN, 0, 0, REFUSE | errno.EAGAIN),
        (RETURN, 0, 0, ALLOW),
    ]


def main(*command: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    steps = processes_refused(*KINDS[os.uname().machine])
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    filter = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(steps), ctypes.addressof(filter))
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program) != 0:
        sys.exit(f"Processes cannot be refused here: {os.strerror(ctypes.get_errno())}")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
