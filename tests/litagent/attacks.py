"""What a hostile program tries: `python -m tests.litagent.attacks ISOLATION FOLDER` prints as JSON what worked.

A process of its own, so that the same attacks run as another user. Each attack prints 1 if it worked, 0 if not.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentlightning.litagent import Container, Limits, Program
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import AttemptedRollout, Outcome
from agentlightning.types.reward import find_final_reward
from tests.litagent.sharing import SHARED, uses_up

TRY = """
import ctypes, glob, json, os, socket, sys
def connects(family, address):
    client = socket.socket(family)
    client.settimeout(5)
    client.connect(address)
def opens(path, flags):
    os.close(os.open(path, flags))
def makes_user_namespace():
    new_user, syscall = 0x10000000, ctypes.CDLL(None).syscall
    if ctypes.CDLL(None).unshare(new_user) == 0:
        return
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    to_clone3 = (ctypes.c_uint64 * 11)(new_user, 0, 0, 0, 17)
    for call in ((clone, new_user | 17, None, None, None, None), (435, to_clone3, ctypes.sizeof(to_clone3))):
        child = syscall(*call)
        if child == 0:
            os._exit(0)
        if child > 0:
            return
    raise OSError("refused")
def calls(x86, arm, *arguments):
    number = {"x86_64": x86, "aarch64": arm}[os.uname().machine]
    given = [a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *given) == -1:
        if ctypes.get_errno() in (1, 38):
            raise OSError("refused")
def opens_socket(family, kind):
    try:
        socket.socket(family, kind).close()
    except OSError as error:
        if error.errno == 97:
            raise
def holds(pattern, text):
    for path in glob.glob(pattern):
        try:
            found = text.encode() in open(path, "rb").read()
        except OSError:
            continue
        if found:
            return
    raise OSError("not found")
def holds_capabilities():
    status = dict(line.split(":\t", 1) for line in open("/proc/self/status") if ":\t" in line)
    if int(status["CapEff"], 16) == 0:
        raise OSError("none")
try:
    {attack}
except OSError:
    print(0)
else:
    print(1)
"""
ATTACKS = {
    "connect to another port of this machine": 'connects(socket.AF_INET, ("127.0.0.1", {port}))',
    "connect to a Unix socket of the host": 'connects(socket.AF_UNIX, "{folder}/socket")',
    "connect to a Unix socket beside the program": 'connects(socket.AF_UNIX, "{folder}/agent/socket")',
    "connect to a Unix socket deep below the program": 'connects(socket.AF_UNIX, "{folder}/agent/deep/er/socket")',
    "write to a named pipe beside the program": 'opens("{folder}/agent/pipe", os.O_WRONLY | os.O_NONBLOCK)',
    "connect to an abstract Unix socket of the host": 'connects(socket.AF_UNIX, "\\0agl-attack-{port}")',
    "read your files": 'opens("{folder}/secret", os.O_RDONLY)',
    "read a run beside the program": 'opens("{folder}/agent/runs/store.db", os.O_RDONLY)',
    "write your files": 'opens("{folder}/secret", os.O_WRONLY)',
    "write the program's own files": 'opens("{folder}/agent/agent.py", os.O_WRONLY)',
    "hold capabilities": "holds_capabilities()",
    "become root of a user namespace": "makes_user_namespace()",
    "leave a key in the user's keyring": 'calls(248, 217, b"user", b"agl", b"x", 1, -4)',
    "read a keyring": "calls(250, 219, 11, -4, 0, 0, 0)",
    "ask for a key": 'calls(249, 218, b"user", b"agl", 0, -4)',
    "start io_uring": "calls(425, 425, 1, 0)",
    "handle page faults by itself": "calls(323, 282, 1)",
    "open a socket to the hypervisor": "opens_socket(40, socket.SOCK_STREAM)",
    "change settings of the kernel": 'opens("/proc/sys/vm/overcommit_memory", os.O_WRONLY)',
    "see other processes": 'holds("/proc/[0-9]*/cmdline", "tests.litagent." + "attacks")',
    "read the environment of your processes": 'holds("/proc/[0-9]*/environ", "the-store\'s-" + "admin-key")',
    "read another attempt's working directory": 'holds("../*/answer", "42")',
}
GRADED = {
    "have its own code run by the grader": (
        "open('json.py', 'w').write('print(1); raise SystemExit')",
        "import json, sys; json.load(sys.stdin); print(0)",
    ),
    "show the grader the environment of your process": (
        "pass",
        "import os, sys; sys.stdin.read(); print(int(any('admin-key' in value for value in os.environ.values())))",
    ),
    "be changed by its grader": (
        "open('answer', 'w').write('42')",
        "import json, os, sys\nworkspace = json.load(sys.stdin)['workspace']\nprint(0)\n"
        "if os.access(workspace + '/answer', os.W_OK): open(workspace + '/answer', 'a').write('!')",
    ),
}


async def run(agent: Program) -> tuple[AttemptedRollout, float | None]:
    store = InMemoryLightningStore()
    runner = LitAgentRunner(DummyTracer())
    runner.init(agent)
    runner.init_worker(0, store)
    try:
        rollout = await runner.step(None, resources={})
        return rollout, find_final_reward((await store.query_spans(rollout.rollout_id)).items)
    finally:
        runner.teardown()
        await store.close()


async def attack(code: str, python: str, folder: Path, **options: Any) -> bool:
    """Whether it worked. What ended in another way than by an answer is an error."""
    script = folder / "agent" / "agent.py"
    script.write_text(code)
    given = ["-c", code] if isinstance(options["isolation"], Container) else [str(script)]  # an image has no script
    # podman loses what a program prints that ends before it could be sent its stdin; these read none.
    rollout, reward = await run(Program([python, "-S", *given], task_as="file", **options))
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    return reward == 1.0


async def everything(isolation: Any, python: str, folder: Path, port: int) -> dict[str, bool]:
    kept = folder / "kept"
    options: dict[str, Any] = {"isolation": isolation, "workspaces": kept, "limits": Limits()}
    worked: dict[str, bool] = {}
    (kept / "another").mkdir(parents=True)
    (kept / "another" / "answer").write_text("42")
    for name, code in ATTACKS.items():
        filled = TRY.replace("{attack}", code.replace("{port}", str(port)).replace("{folder}", str(folder)))
        worked[name] = await attack(filled, python, folder, **options)
    for name, (program, grader) in GRADED.items():
        code = program + "\nprint(0)"
        worked[name] = await attack(code, python, folder, grader=[python, "-S", "-c", grader], **options)
    for name, take in SHARED.items():
        worked[name] = await uses_up(take, partial(attack, python=python, folder=folder, **options), folder / "shared")
    worked["be changed by its grader"] = any(path.read_text() == "42!" for path in kept.glob("*/answer"))
    return worked


@contextmanager
def targets(folder: Path) -> Iterator[int]:
    """What the attacks are aimed at; the port that listens."""
    (folder / "agent" / "runs").mkdir(parents=True)
    (folder / "agent" / "runs" / "store.db").touch()
    (folder / "secret").touch()
    (folder / "agent" / "deep" / "er").mkdir(parents=True)
    os.mkfifo(folder / "agent" / "pipe")
    pipe = os.open(folder / "agent" / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    local = [socket.socket(socket.AF_UNIX) for _ in range(4)]
    beside = [f"{folder}/{place}socket" for place in ("", "agent/", "agent/deep/er/")]
    addresses = [*beside, f"\0agl-attack-{port}"]
    for one, address in zip(local, addresses, strict=True):
        one.bind(address)
        one.listen()
    for path in (*beside, folder / "agent" / "pipe"):
        os.chmod(path, 0o777)  # whoever the program is
    try:
        yield port
    finally:
        os.close(pipe)
        for one in (listening, *local):
            one.close()


def main(isolation: str, folder: str) -> None:
    chosen = {"none": None, "bubblewrap": "bubblewrap"}.get(isolation, isolation)
    python = sys.executable
    if isinstance(chosen, str) and chosen.startswith("["):
        chosen, python = Container(json.loads(chosen)), "/usr/bin/python3"
    with targets(Path(folder)) as port:
        sys.stdout.write(json.dumps(asyncio.run(everything(chosen, python, Path(folder), port))))


if __name__ == "__main__":
    main(*sys.argv[1:])
