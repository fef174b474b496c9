"""Inside a sandbox: `relay.py USER FOLDER SOCKET PORT COMMAND…` becomes USER and runs the command in FOLDER, where it
finds the gateway at 127.0.0.1:PORT. "-" for USER stays who it is, "-" for PORT has no gateway.

Only the standard library, and nothing of the package: it is started with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import ctypes
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


def main(user: str, folder: str, path: str, port: str, *command: str) -> None:
    if user != "-":
        become(int(user))
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
