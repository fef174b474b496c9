"""Inside a sandbox: `relay.py USER FOLDER SOCKET PORT COMMAND…` becomes USER and runs the command in FOLDER, where it
finds the gateway at 127.0.0.1:PORT. "-" for USER stays who it is, "-" for PORT has no gateway. The command can make
those system calls that are listed: none for user namespaces, in which it would be root, and none for keyrings, which
all attempts of one user share.

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
LOAD, EQUAL, ABOVE, AT_LEAST, HAS_BITS, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Where a system call's description has these."""
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NEW_NAMESPACES = 0x7E020000
CLONE3 = 435
NEWER = 450
"""Calls from this number on came after the lists below. They are said not to be there, as on an older kernel; so are
those of the third kind of x86 programs, whose numbers are higher still."""
FAMILIES = (1, 2, 10, 16)
"""Of sockets: Unix, IPv4, IPv6, and netlink, by which programs list the network's interfaces. No vsock, packet, alg."""
CALLS = {
    "x86_64": (
        *(0xC000003E, 56, 41),
        "0-40 42-55 57-100 102 104-133 137-138 140-152 157-160 162 186-211 213-226 228-235 240-245 247 251-255 257-271 "
        "273-277 280-297 299 301-302 305-307 309 314-319 322 324-332 334 424 434 436-437 439 441 444-449",
    ),
    "aarch64": (
        *(0xC00000B7, 220, 198),
        "0-17 19-38 43-50 52-57 59 61-74 76-88 90-91 93-96 98-103 107-111 113-115 118-141 143-160 163-169 171-197 "
        "199-216 221-223 226-234 240 242-243 260-261 263 266-267 269 274-279 281 283-291 293 403 405-414 417-424 434 "
        "436-437 439 441 444-449",
    ),
}
"""Of each machine: the architecture, the numbers of clone and socket, and those of all other calls that are allowed:
what containers may call by themselves (containers' common profile), less the calls for mounts, keyrings, other
processes' memory, namespaces and the places of memory."""


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(64 * 1024):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def connect(client: socket.socket, gateway: socket.socket, path: str, places: threading.Semaphore) -> None:
    try:
        with contextlib.suppress(OSError, RuntimeError), client, gateway:
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
        with contextlib.ExitStack() as opened:
            try:  # first what leads on, so that who is let in does not lack it
                gateway = opened.enter_context(socket.socket(socket.AF_UNIX))
                client = opened.enter_context(listening.accept()[0])
                threading.Thread(target=connect, args=(client, gateway, path, places), daemon=True).start()
                opened.pop_all()
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


def allowed_calls(architecture: int, clone: int, socket: int, allowed: str) -> list[tuple[int, int, int, int]]:
    """A filter that lets the listed calls through: code, jump if so, jump if not, value. clone3, whose flags a filter
    cannot see, is said not to be there; the C library then takes clone. Programs of 32 bits do not run.
    """
    families = [(EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    ranges = [number.partition("-")[::2] for number in allowed.split()]
    between = [
        step
        for first, last in ranges
        for step in ((AT_LEAST, 0, 2, int(first)), (ABOVE, 1, 0, int(last or first)), (RETURN, 0, 0, ALLOW))
    ]
    return [
        (LOAD, 0, 0, ARCHITECTURE),
        (EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (LOAD, 0, 0, NUMBER),
        (AT_LEAST, 1, 0, NEWER),
        (EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, REFUSE | errno.ENOSYS),
        (EQUAL, 0, 4, clone),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        (HAS_BITS, 1, 0, NEW_NAMESPACES),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE | errno.EPERM),
        (EQUAL, 0, len(families) + 3, socket),
        (LOAD, 0, 0, FIRST_ARGUMENT),
        *families,
        (RETURN, 0, 0, REFUSE | errno.EAFNOSUPPORT),
        (RETURN, 0, 0, ALLOW),
        *between,
        (RETURN, 0, 0, REFUSE | errno.EPERM),
    ]


def refuse_other_calls() -> None:
    """Where this machine or its kernel knows no such filter, the probe finds out whether it matters."""
    kind = CALLS.get(os.uname().machine)
    if kind is None:
        return
    code = b"".join(struct.pack("HBBI", *step) for step in allowed_calls(*kind))
    filter = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HP", len(code) // 8, ctypes.addressof(filter))
    ctypes.CDLL(None).prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program)


def main(user: str, folder: str, path: str, port: str, *command: str) -> None:
    if user != "-":
        become(int(user))
    refuse_other_calls()
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
