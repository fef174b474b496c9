"""Runs a model's code in a sandbox without a network, with limits, and says what its function gives."""

from __future__ import annotations

import asyncio
import json
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentlightning.errors import AgentError, ConfigError
from agentlightning.litagent.isolation import check_isolation, isolated
from agentlightning.litagent.process import Limits, run_command

from .inside.alone import KINDS

INSIDE = Path(__file__).parent / "inside"
LIMITS = Limits(output_bytes=64 * 1024, memory_bytes=256 * 1024**2, file_bytes=1024**2, cpu_seconds=2)
SECONDS = 20.0
"""By the clock; a busy machine needs more of it than `cpu_seconds`."""
AT_ONCE = 4
"""Sandboxes at the same time: each is a process or two."""
_places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


PYTHON = (sys.executable, "-I", "-S")


@dataclass(frozen=True)
class Language:
    """How code of a language is run."""

    judge: str
    """A file in `inside` that reads {"code", "inputs"} on stdin and, in its last line, prints the values of `f`; JSON
    both.
    """
    runs: tuple[str, ...] = PYTHON
    """What runs the judge."""
    limits: Limits = LIMITS
    launcher: tuple[str, ...] = ()
    """What starts that: `ALONE` where the judge does not itself see to it that the code starts no process."""

    def command(self) -> list[str]:
        """Raises ConfigError where what runs the judge is not installed, or the launcher does not know the machine. By
        its whole path the sandbox shows a program."""
        if self.launcher == ALONE and platform.machine() not in KINDS:
            raise ConfigError(f"A task's code is run by {self.runs[0]} on {' and '.join(KINDS)} only.")
        program = shutil.which(self.runs[0])
        if program is None:
            raise ConfigError(f"A task's code is run by {self.runs[0]}, which is not installed.")
        return [*self.launcher, program, *self.runs[1:], str(INSIDE / self.judge)]


ALONE = (*PYTHON, str(INSIDE / "alone.py"))
LANGUAGES: dict[str, Language] = {
    "Python": Language("judge.py"),
    # Node takes far more addresses than memory, and threads of its own.
    "JavaScript": Language(
        "judge.mjs", ("node", "--v8-pool-size=1"), replace(LIMITS, memory_bytes=1536 * 1024**2), ALONE
    ),
}
"""Another language is another line, and a judge for it in `inside`."""


@dataclass(frozen=True)
class Answer:
    """What the function gave for each input, or why it gave nothing."""

    values: list[Any]
    error: str | None = None


async def run_code(code: str, inputs: list[Any], language: str = "Python") -> Answer:
    """The values of `f` in the code. What is wrong with the code is an error in the answer, and raises nothing.

    Raises ConfigError for a language that is none of `LANGUAGES` or cannot be run here, and where there is no sandbox.
    """
    check_isolation("bubblewrap")
    spoken = LANGUAGES.get(language)
    if spoken is None:
        raise ConfigError(f"A task's language is {language!r}; the sandbox runs {' and '.join(LANGUAGES)}.")
    command, given = spoken.command(), json.dumps({"code": code, "inputs": inputs}).encode()
    place = _places.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(AT_ONCE))
    async with place:
        with tempfile.TemporaryDirectory(prefix="agl-code-") as name:
            try:
                async with asyncio.timeout(SECONDS), isolated("bubblewrap", command, Path(name), {}) as wrapped:
                    done = await run_command(
                        wrapped.command,
                        folder=Path(name),
                        environment=wrapped.environment,
                        stdin=given,
                        limits=spoken.limits,
                    )
            except TimeoutError:
                return Answer([], "it took too long")
            except AgentError as error:
                return Answer([], str(error).partition("\n")[0])
    if done.exit_code:
        return Answer([], _last_line(done.stderr)[:200] or "it was stopped")
    return _read(done.stdout, len(inputs))


def _read(text: str, count: int) -> Answer:
    """The values in what was printed: whatever that is, it is only compared with what is right."""
    try:
        values = json.loads(_last_line(text))
    except ValueError:
        values = None
    if not isinstance(values, list) or len(values) != count:
        return Answer([], "it gave no values")
    return Answer(values)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
