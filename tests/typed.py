"""`python ARGUMENTS`, as typed into a terminal, in a fork of an interpreter that has imported the package already.

Importing what a command needs takes a second, and so many tests run commands that they would spend minutes on it. A
fork has a process, a folder, an environment and an end of its own, as if it had been started anew.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests import warm_model

COMMANDS = (
    *("app", "configuration", "demo", "evaluate", "gateway", "models", "plan", "run", "runner", "serve", "show"),
    *("store", "train"),
)
WARM = (
    *(f"agentlightning.cli.{name}" for name in COMMANDS),
    "agentlightning.store.transfer",
    "agentlightning.trainer.endpoints",
    *("filelock", "huggingface_hub", "openai", "pyarrow.parquet"),
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
_server: subprocess.Popen[str] | None = None
_one_at_a_time = threading.Lock()


def typed(
    folder: Path,
    *arguments: str,
    stdin: str | None = None,
    timeout: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """`python ARGUMENTS` in a folder, without a network, on a wide screen; raises TimeoutExpired."""
    environment = environment or {}
    whole = {**os.environ, **OFFLINE, **environment}
    with tempfile.TemporaryDirectory() as files:
        streams = [Path(files) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(stdin or "")
        order = {
            "folder": str(folder),
            "arguments": arguments,
            "environment": whole,
            "streams": list(map(str, streams)),
        }
        with _one_at_a_time:
            status = _order(order, timeout)
        printed, complained = (stream.read_text() for stream in streams[1:])
    return subprocess.CompletedProcess(arguments, status, printed, complained)


def agl(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`agl ARGUMENTS`."""
    return typed(folder, "-m", "agentlightning", *arguments, environment=environment)


def _order(order: dict[str, Any], timeout: float) -> int:
    server = _started()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    process = int(server.stdout.readline())
    late = threading.Timer(timeout, os.kill, (process, signal.SIGKILL))
    late.start()
    try:
        status = int(server.stdout.readline())
    except BaseException:  # a test that takes too long stops waiting, and the next command reads an answer of its own
        os.kill(process, signal.SIGKILL)
        server.stdout.readline()
        raise
    finally:
        late.cancel()
    if status == -signal.SIGKILL:
        raise subprocess.TimeoutExpired(order["arguments"], timeout)
    return status


def _started() -> subprocess.Popen[str]:
    global _server
    if _server is None:
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.typed"],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **OFFLINE},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(_stop, _server)
    return _server


def _stop(server: subprocess.Popen[str]) -> None:
    server.communicate(timeout=30)


# ---- the warm interpreter ------------------------------------------------------------------------------------------


def main() -> None:
    """Fork for each order that is read, and answer with the fork's process id, then with how it ended."""
    warm_model.install()
    for name in WARM:
        with suppress(ModuleNotFoundError):  # the environments of tests/clients do not have all of them
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy every page of what all of them share
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os._exit(_end(json.loads(line)))
        _answer(process)
        _, status = os.waitpid(process, 0)
        _answer(os.waitstatus_to_exitcode(status))


def _answer(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _end(order: dict[str, Any]) -> int:
    """Do what was ordered, end as an interpreter does, and return its status.

    What is left out is to free each imported module: that alone took most of a command's time.
    """
    status = 0
    try:
        _become(order)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)  # noqa: T201 - as an interpreter does
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - waits for threads, as an interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(ValueError, OSError):  # closed by what ran
            stream.flush()
    return status & 0xFF


def _become(order: dict[str, Any]) -> None:
    """What was ordered, as the interpreter does it."""
    for descriptor, path in enumerate(order["streams"]):
        opened = os.open(path, os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115 - for good
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[1:1] = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    first, *rest = order["arguments"]
    if first == "-m":
        sys.path[0], sys.argv = order["folder"], rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0], sys.argv = "", ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0], sys.argv = str(Path(order["folder"], first).parent), [first, *rest]
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main()
