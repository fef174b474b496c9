"""Inside a sandbox: `relay.py SOCKET PORT COMMAND…` runs the command, for which 127.0.0.1:PORT is the gateway.

Only the standard library, and nothing of the package: it is started with `python -I -S`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading


def pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(64 * 1024):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def serve(listening: socket.socket, path: str) -> None:
    while True:
        client, _ = listening.accept()
        gateway = socket.socket(socket.AF_UNIX)
        try:
            gateway.connect(path)
        except OSError:
            client.close()
            continue
        for pair in ((client, gateway), (gateway, client)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def main(path: str, port: str, *command: str) -> None:
    listening = socket.create_server(("127.0.0.1", int(port)), backlog=128)
    threading.Thread(target=serve, args=(listening, path), daemon=True).start()
    try:
        code = subprocess.Popen(command).wait()
    except FileNotFoundError as error:
        print(error, file=sys.stderr)  # noqa: T201
        code = 127
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
