"""Inside the sandbox of a Python grader: `sandboxed.py SECONDS MEMORY_BYTES FILE_BYTES FOLDER…`, started by its text.

The grader's source comes in the first line of stdin, a sample in each line after it; each is answered by a line. For
every sample a fork runs the source anew, and whatever it started is killed before the next one. What it wrote
into the folders is deleted.

Only the standard library, and nothing of the package: it runs in whichever interpreter graders have.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import json
import linecache
import math
import os
import resource
import select
import signal
import sys
import time
import traceback
import types
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
MOST_PROCESSES = 32
MOST_BYTES = 64 * 1024
"""Of an answer."""
FILE = "grader.py"


def import_what_it_imports(source: str) -> None:
    """Once for all samples, as far as it works: each fork has these modules already."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            with contextlib.suppress(BaseException):
                __import__(name)


def number(value: Any) -> float:
    """What `grade` returned, as a finite number."""
    if not hasattr(type(value), "__float__") and not hasattr(type(value), "__index__"):
        raise TypeError(f"grade() returned a {type(value).__name__}, not a number")
    found = float(value)
    if not math.isfinite(found):
        raise ValueError(f"grade() returned {found}, not a finite number")
    return found


def run(source: str, request: dict[str, Any]) -> dict[str, Any]:
    """Run the source and its `grade` for one sample."""
    try:
        module = types.ModuleType("grader")
        sys.modules["grader"] = module
        linecache.cache[FILE] = (len(source), None, source.splitlines(True), FILE)
        exec(compile(source, FILE, "exec"), module.__dict__)
        return {"reward": number(module.grade(request["sample"], request["item"]))}
    except BaseException as error:  # whatever a grader raises is an answer
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
        where = f" ({FILE}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
        try:
            complaint = str(error).strip()
        except BaseException:  # a __str__ of the grader's own
            complaint = ""
        return {"error": f"{type(error).__name__}{': ' if complaint else ''}{complaint[:1000]}{where}"}


def limit(memory: int, files: int) -> None:
    """Of this process and what it starts."""
    for kind, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, files),
        (resource.RLIMIT_NPROC, MOST_PROCESSES),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # a lower one is in force
            resource.setrlimit(kind, (most, most))


def below(pid: int) -> list[int]:
    """The processes that it started, and those that these started."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{entry}/stat", "rb") as file:
                parents[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
    found, level = list[int](), {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        found += level
    return found


def end_all(group: int) -> None:
    """Kill a group, and all that this process started, until nothing is left; what its parent leaves comes to this
    process."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
        for child in below(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.001)
        except ChildProcessError:
            return


def receive(answers: int, requests: int, seconds: float, pid: int) -> bytes | None:
    """The fork's answer, or as much of it as came before the fork ended. None where it took too long."""
    deadline, data = time.monotonic() + seconds, b""
    while not data.endswith(b"\n") and len(data) <= MOST_BYTES:
        ready, _, _ = select.select([answers, requests], [], [], max(0.0, deadline - time.monotonic()))
        if requests in ready:  # nobody waits for the answer any more
            end_all(pid)
            os._exit(0)
        if not ready:
            return None
        chunk = os.read(answers, MOST_BYTES)
        if not chunk:
            break
        data += chunk
    return data


def graded(source: str, line: bytes, limits: tuple[float, int, int], protocol: tuple[int, int]) -> dict[str, Any]:
    """Grade one sample in a fork."""
    seconds, memory, files = limits
    answers, answering = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for descriptor in (*protocol, answers):
            os.close(descriptor)
        limit(memory, files)
        own, answer = os.getpid(), run(source, json.loads(line))
        if own == os.getpid():  # else it is a fork of the grader's that came back from `grade` as well
            os.write(answering, json.dumps(answer).encode() + b"\n")
        os._exit(0)
    os.close(answering)
    try:
        data = receive(answers, protocol[0], seconds, pid)
        if data is None:
            return {"error": f"TimeoutError: it took more than {seconds:g} s"}
        if data.endswith(b"\n"):
            found = json.loads(data)
            return found if isinstance(found, dict) else {"error": "ValueError: it wrote into its own answer"}
        time.sleep(0.01)
        ended, status = os.waitpid(pid, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else 0
        how = f"was killed by signal {-code}" if code < 0 else f"ended the process with {code}"
        return {"error": f"RuntimeError: it {how}, without an answer"}
    except (ValueError, RecursionError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        os.close(answers)
        end_all(pid)


def empty(folder: str, device: int | None = None) -> None:
    """Delete what is in a folder, as far as it can be. What is mounted there stays and is not even looked at: it may be
    the interpreter with all its packages. `device`: that of the folder."""
    with contextlib.suppress(OSError, RecursionError):
        device = os.lstat(folder).st_dev if device is None else device
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                elif entry.stat(follow_symlinks=False).st_dev == device:
                    empty(entry.path, device)
                    os.rmdir(entry.path)


def main(seconds: str, memory: str, files: str, *folders: str) -> None:
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # where memory is short, this ends first
    with contextlib.suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    reading = os.fdopen(requests, "rb", closefd=False)
    source = json.loads(reading.readline())
    with contextlib.suppress(BaseException):  # its error is each sample's
        import_what_it_imports(source)
    os.write(answers, b'{"ready": true}\n')
    for line in iter(reading.readline, b""):
        found = graded(source, line, (float(seconds), int(memory), int(files)), (requests, answers))
        for folder in folders:
            empty(folder)
        os.write(answers, json.dumps({**found, "id": json.loads(line)["id"]}).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
