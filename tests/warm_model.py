"""The model process of a quick test, as a fork of a process that has imported torch and transformers already.

Importing them takes four seconds of a processor, and some thirty quick tests have a model process of their own. What
is started in its place is this file, which costs 20 ms: it hands its streams and its socket to the process that forks,
waits, and ends as the fork does; a fork whose stand-in was killed ends, too. Slow tests, and those marked
`own_model_process`, start the real one.
"""

from __future__ import annotations

import array
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

ADDRESS = "AGL_WARM_MODEL"
"""The environment variable that says where the process that forks listens; the next connection starts it."""
KEPT = (ADDRESS, "HOME", "PATH", "TMPDIR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ENABLE_MPS_FALLBACK")
"""What the process that forks has of the environment of the test that comes first."""
STREAMS = 3


# ---- in the tests: who is started, the real one or the stand-in ------------------------------------------------------


class _Interpreter:
    """What `child.sys` is while tests run."""

    @property
    def executable(self) -> str:
        address = os.environ.get(ADDRESS)
        return sys.executable if address is None else _program(Path(f"{address}.py"))


def install() -> None:
    """From now on a model process is a fork while `ADDRESS` is set."""
    from agentlightning.backend.embedded import child

    child.sys = _Interpreter()  # pyright: ignore[reportAttributeAccessIssue]


def _program(file: Path) -> str:
    """The stand-in as a program of its own, with as little of Python as it needs."""
    if not file.exists():
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(f"#!{sys.executable} -IS\nimport runpy\nrunpy.run_path({__file__!r}, run_name='__main__')\n")
        new.chmod(0o700)
        new.rename(file)
    return str(file)


# ---- the stand-in ----------------------------------------------------------------------------------------------------


def stand_in(channel: int) -> None:
    """Have a model process forked that serves a socket, and end as it ends."""
    server = _connected(os.environ[ADDRESS])
    order = json.dumps({"folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    files = array.array("i", [*range(STREAMS), channel])
    server.sendmsg([len(order).to_bytes(4, "big") + order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    os.close(channel)
    for stream in range(STREAMS):
        os.close(stream)  # their other ends see the fork's end, not this process's
    status = int(server.recv(16) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _connected(address: str) -> socket.socket:
    """A connection to the process that forks, which is started by whoever comes first."""
    for tries in range(600):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(address)
        except OSError:
            connection.close()
            if tries == 0:
                _start(address)
            time.sleep(0.05)
        else:
            return connection
    raise TimeoutError(f"no process forks at {address}")


def _start(address: str) -> None:
    """Once: who makes the file starts it."""
    try:
        os.close(os.open(f"{address}.started", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if os.fork() == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(STREAMS):
            os.dup2(nothing, stream)
        os.closerange(STREAMS, 1024)
        os.chdir(Path(__file__).parents[1])
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        os.execve(sys.executable, [sys.executable, "-m", "tests.warm_model"], environment)


# ---- the process that forks ------------------------------------------------------------------------------------------


def main() -> None:
    """Fork for each connection until the tests that it was started for have ended."""
    import agentlightning.backend.embedded.server  # noqa: F401 - what all forks share

    address, tests = os.environ[ADDRESS], int(os.environ[ADDRESS].rsplit("-", 1)[1])
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen(64)
    os.rename(f"{address}.new", address)
    gc.freeze()  # a collection in a fork would copy every page of what all of them share
    forks: dict[int, socket.socket] = {}
    waiting = selectors.DefaultSelector()
    waiting.register(listening, selectors.EVENT_READ)
    while _runs(tests):
        if waiting.select(0.05):
            connection, _ = listening.accept()
            if (process := os.fork()) == 0:
                for other in (listening, *forks.values()):
                    other.close()
                _become_model_process(connection)
            forks[process] = connection
        while forks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            with forks.pop(ended[0]) as connection, suppress(BrokenPipeError):  # its stand-in was killed
                connection.send(b"%d" % os.waitstatus_to_exitcode(ended[1]))
    for process in forks:
        os.kill(process, signal.SIGKILL)
    for file in (address, f"{address}.started", f"{address}.py"):
        with suppress(FileNotFoundError):
            os.unlink(file)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _become_model_process(connection: socket.socket) -> None:
    import runpy
    import threading

    data, files, *_ = socket.recv_fds(connection, 1 << 20, STREAMS + 1)
    while len(data) < 4 + int.from_bytes(data[:4], "big"):
        data += connection.recv(1 << 20)
    order = json.loads(data[4:])
    for stream, file in enumerate(files[:STREAMS]):
        os.dup2(file, stream)
        os.close(file)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:1] = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    sys.argv = ["agentlightning.backend.embedded", str(files[STREAMS])]
    runpy.run_module("agentlightning.backend.embedded", run_name="__main__", alter_sys=True)
    os._exit(1)


def _end_with(stand_in: socket.socket) -> None:
    stand_in.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        stand_in(int(sys.argv[-1]))
    else:
        main()
