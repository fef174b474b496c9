"""Inside a sandbox: `relay.py USER FOLDER SOCKET PORT COMMAND…` becomes USER and runs the command in FOLDER, where it
finds the gateway at 127.0.0.1:PORT. "-" for USER stays who it is, "-" for PORT has no gateway. The command can make no
user namespace: in one it would be root, which the kernel lets do more than anybody else.

Only the standard library, and nothing of the package: it is started with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

CAPABILITY_VERSION_3 = 0x20080522
MOST_CONNECTIONS = 1024
"""At the same time; who comes then waits. Each takes two file descriptors and two threads."""

# seccomp(2) and linux/filter.h
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
LOAD, EQUAL, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Where a system call's description has these."""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
CLONE_NEWUSER = 0x10000000
CLONE3 = 435
X32 = 0x40000000
"""From this number on the calls are those of a third kind of x86 programs, which few kernels know."""
CALLS = {
    "x86_64": ((0xC000003E, 56, 272), (0x40000003, 120, 310)),
    "aarch64": ((0xC00000B7, 220, 97), (0x40000028, 120, 337)),
}
"""Of each machine, for programs of 64 and of 32 bits: the architecture, and the numbers of clone and unshare."""


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(64 * 1024):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def connect(client: socket.socket, path: str, places: threading.Semaphore) -> None:
    try:
        with contextlib.suppress(OSError, RuntimeError), client, socket.socket(socket.AF_UNIX) as gateway:
            gateway.connect(path)
            back = threading.Thread(target=pump, args=(gateway, client), daemon=True)
            back.start()
            pump(client, gateway)
            back.join()
    finally:
        places.release()


def serve(listening: socket.socket, path: str) -> None:
    places = threading.Semaphore(MOST_CONNECTIONS)
    while True:
        places.acquire()
        try:
            client, _ = listening.accept()
            threading.Thread(target=connect, args=(client, path, places), daemon=True).start()
        except (OSError, RuntimeError):  # no file descriptor or thread is left: some connection will end
            places.release()
            time.sleep(0.1)


def become(user: int) -> None:
    """Give root and all capabilities up; no_new_privs, which bubblewrap sets, keeps them away."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    header, none = struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:  # the inheritable ones outlive a change of user
        raise OSError(ctypes.get_errno(), "The capabilities cannot be given up")


def user_namespaces_refused(architecture: int, clone: int, unshare: int) -> list[tuple[int, int, int, int]]:
    """The part of a filter for one architecture: code, jump if so, jump if not, value. clone3, whose flags a filter
    cannot see, is said not to be there; the C library then takes clone.
    """
    return [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 0, 10, architecture),  # else the next part
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 7, 0, X32),
        (EQUAL, 6, 0, CLONE3),
        (EQUAL, 1, 0, clone),
        (EQUAL, 0, 2, unshare),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (HAS_BITS, 1, 0, CLONE_NEWUSER),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
    ]


def refuse_user_namespaces() -> None:
    """Where this machine or its kernel knows no such filter, the probe finds out whether it matters."""
    kinds = CALLS.get(os.uname().machine, ())
    if not kinds:
        return
    steps = [step for kind in kinds for step in user_namespaces_refused(*kind)]
    code = b"".join(struct.pack("HBBI", *step) for step in (*steps, (RETURN, 0, 0, REFUSE | errno.ENOSYS)))
    filter = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(filter))
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program)


def main(user: str, folder: str, path: str, port: str, *command: str) -> None:
    if user != "-":
        become(int(user))
    refuse_user_namespaces()
    os.chdir(folder)
    if port != "-":
        listening = socket.create_server(("127.0.0.1", int(port)), backlog=128)
        threading.Thread(target=serve, args=(listening, path), daemon=True).start()
    try:
        code = subprocess.Popen(command).wait()
    except OSError as error:
        print(error, file=sys.stderr)  # noqa: T201
        code = 127
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
