"""A terminal agent as a program in bubblewrap, with all that its model has it do; the hidden tests stay outside."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.errors import ConfigError
from agentlightning.keys import CALLS
from agentlightning.trainer.example import load_example
from agentlightning.types import AttemptedRollout, NamedResources

from .grading import left_behind, score

HERE = Path(__file__).parent
PACKAGE = "@openai/codex"
VERSION: str = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"][PACKAGE]
_hidden: ContextVar[list[Any]] = ContextVar("hidden")


class Repairer(agl.Program):
    """A program that is given its task without the hidden tests, and a key that reads no task from the store."""

    @property
    def key_scopes(self) -> Sequence[str]:
        return [CALLS]

    @property
    def origin(self) -> tuple[str, str | None]:
        """Where `agl eval` finds it again."""
        return "terminal_agent", str(HERE / "terminal_agent.py")

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> float | None:
        _hidden.set(task["hidden"])
        shown = {name: value for name, value in task.items() if name != "hidden"}
        return await super().rollout_async(shown, resources, rollout)


async def grade(run: agl.ProgramRun) -> float:
    """1.0 if the module that was left passes the hidden tests, else 0.0."""
    return await score(left_behind(run.workspace, run.task["module"]), _hidden.get())


def install_command() -> list[str]:
    """What installs Codex where `codex` looks for it."""
    return ["npm", "install", "--no-package-lock", "--prefix", str(_folder()), f"{PACKAGE}@{VERSION}"]


def codex() -> str:
    """The agent's program, as npm installs it. Raises ConfigError that says how to."""
    found = sorted(_folder().glob("node_modules/@openai/codex-*/vendor/*/bin/codex"))
    if not found:
        raise ConfigError(
            f"The example 'terminal' needs {PACKAGE} {VERSION}. Install it with:  {shlex.join(install_command())}"
        )
    return str(found[0])


def _folder() -> Path:
    folder: Path = load_example("sentiment", "packages").cache_dir()
    return folder / f"codex-{VERSION}"


def make_agent() -> Repairer:
    """The agent. Raises ConfigError where Codex or bubblewrap is missing."""
    command = [sys.executable, "-I", "-S", str(HERE / "inside" / "start.py"), codex()]
    return Repairer(command, grader=grade, isolation="bubblewrap", limits=agl.Limits(file_bytes=64 * 1024**2))
