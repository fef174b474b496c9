"""Two hostile programs at the same time: one takes all that the kernel gives to a user, the other one wants some."""

from __future__ import annotations

import asyncio
import resource
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

PROGRAM = """
import ctypes, os, signal, time
children = []
def one_more_process():
    child = os.fork()
    if child == 0:
        signal.pause()
    children.append(child)
def one_more_timer():
    if ctypes.CDLL(None).timer_create(1, None, ctypes.byref(ctypes.c_void_p())) != 0:
        raise OSError("refused")
def say(name, text):
    with open("unfinished", "w") as file:
        file.write(text)
    os.rename("unfinished", name)
def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
say("ready-" + os.environ["PART"], "")
wait_for("go")
refused = 0
try:
    for _ in range(int(os.environ["WANTS"])):
        {take}
except OSError:
    refused = 1
say("done", str(refused))
wait_for("end")
for child in children:
    os.kill(child, signal.SIGKILL)
print(0)
"""
SHARED = {
    "use up another attempt's processes": "one_more_process()",
    "use up another attempt's timers": "one_more_timer()",
}
EACH = 400
"""So many of them each user has in these tests; containers are given the same by their command."""
PARTS = {"greedy": EACH + 100, "poor": 20}
"""How many each wants. The second one more than a few: signals of others under way count for a moment too."""


async def uses_up(take: str, attack: Callable[..., Awaitable[bool]], kept: Path) -> bool:
    """Whether the second of two attempts is refused, because the first one has all. Both end well."""
    code = PROGRAM.replace("{take}", take)
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_SIGPENDING):
        resource.setrlimit(kind, (EACH, resource.getrlimit(kind)[1]))
    environments: list[Any] = [{"PART": part, "WANTS": str(wants)} for part, wants in PARTS.items()]
    async with asyncio.timeout(60):
        refused, *_ = await asyncio.gather(
            _in_turn(kept), *(attack(code, env=env, workspaces=kept) for env in environments)
        )
    shutil.rmtree(kept)
    return refused


async def _in_turn(kept: Path) -> bool:
    greedy, poor = [(await _made(kept, f"*/ready-{part}")).parent for part in PARTS]
    for place in (greedy, poor):
        (place / "go").touch()
        await _made(place, "done")
    for place in (greedy, poor):
        (place / "end").touch()
    return (poor / "done").read_text() == "1"


async def _made(folder: Path, pattern: str) -> Path:
    """What a program makes, as soon as it is there."""
    while not (found := list(folder.glob(pattern))):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.02)
    return found[0]
