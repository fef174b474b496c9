"""Environments whose package runs in an interpreter of its own, since its versions fight with ours.

A worker is a script that imports that package and nothing of ours. `worker.py list NAME` prints its tasks, each as a
line of JSON, those that the environment itself validates on with `"split": "validation"`. `worker.py run NAME` reads
one of them on stdin, works on it, and prints as its last line `{"rewards": {name: number}}`, or `{"error": text}` where
there is none. It finds its model in the usual variables.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.environments.base import Environment, Probe
from agentlightning.errors import AgentError, ConfigError, ExecutorError
from agentlightning.litagent import LitAgent
from agentlightning.litagent.process import Captured, Limits, run_command
from agentlightning.litagent.program import base_environment, endpoint_variables, first_llm
from agentlightning.types import AttemptedRollout, NamedResources
from agentlightning.types.reward import checked_reward

_LIST_SECONDS = 300.0


def module_path() -> str:
    """Where a worker finds modules: the folder that we were started in, and what PYTHONPATH names."""
    return os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))


class ForeignEnvironment(Environment):
    """Tasks and rewards of a worker."""

    scheme: ClassVar[str]
    worker: ClassVar[Path]
    install: ClassVar[str]
    """What its interpreter needs."""

    def __init__(
        self, name: str, *, python: str | None, reward_key: str | None, settings: Mapping[str, Any], val_tasks: int
    ) -> None:
        """`settings` are the worker's; so many of its tasks as `val_tasks` says are for validation."""
        self.name, self.reward_key = name, reward_key
        self._python = str(Path(python).expanduser()) if python else sys.executable
        self._settings = json.dumps(dict(settings))
        self._val = val_tasks
        self._listed: list[Any] | None = None
        self.agent = _Worker(self)

    def command(self, what: str) -> list[str]:
        """The worker's, to list or to run."""
        return [self._python, str(self.worker), what, self.name, self._settings]

    def tasks(self) -> Sequence[Any]:
        return self._split()[0]

    def val_tasks(self) -> Sequence[Any]:
        return self._split()[1]

    def _split(self) -> tuple[list[Any], list[Any]]:
        """Tasks to train and to validate on: of the environment's own for that, the first; else the last of all."""
        if self._listed is None:
            self._listed = self._read()
        trained = [task for task in self._listed if task.get("split") != "validation"]
        kept = [task for task in self._listed if task.get("split") == "validation"]
        most = len(kept) if kept else len(trained) - 1
        if not 0 <= self._val <= most:
            raise ConfigError(
                f"{self.scheme}: val_tasks is {self._val}, and there are {len(trained)} tasks"
                f"{f' and {len(kept)} to validate on' if kept else ''}."
            )
        if kept:
            return trained, kept[: self._val]
        return trained[: len(trained) - self._val], trained[len(trained) - self._val :]

    def _read(self) -> list[Any]:
        try:
            done = subprocess.run(
                self.command("list"),
                capture_output=True,
                text=True,
                timeout=_LIST_SECONDS,
                check=False,
                env={**os.environ, "PYTHONPATH": module_path()},
            )
        except OSError as error:
            raise ConfigError(f"{self.scheme}: {self._python} cannot be run (python=…): {error}") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self.scheme}: {self.name} lists no tasks within {_LIST_SECONDS:g} s.") from None
        if done.returncode != 0:
            missing = f" {self._python} needs  {self.install}" if "ModuleNotFoundError" in done.stderr else ""
            raise ConfigError(f"{self.scheme}: {self.name} cannot be loaded.{missing}\n{done.stderr.strip()[-800:]}")
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    async def probes(self, tasks: Sequence[Any]) -> AsyncIterator[Probe]:
        began = time.perf_counter()
        count = sum(map(len, await asyncio.to_thread(self._split)))
        seconds = time.perf_counter() - began
        yield Probe(
            task=f"{count} tasks", by="loading", reward=None, expected="tasks", good=count > 0, why="", seconds=seconds
        )


class _Worker(LitAgent[Any]):
    """Starts the worker for each attempt."""

    def __init__(self, environment: ForeignEnvironment) -> None:
        super().__init__()
        self._environment = environment

    @property
    def origin(self) -> tuple[str, str | None]:
        return f"{self._environment.scheme}:{self._environment.name}", None

    def check_task(self, task: Any) -> None:
        if not isinstance(task, Mapping) or "id" not in task:
            raise ConfigError(f"A task of {self._environment.scheme}: has an id, and not {json.dumps(task)[:200]}.")

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> None:
        llm = first_llm(resources)
        if llm is None:
            raise AgentError("The rollout's resources have no model.")
        captured, ended = Captured.empty(), None
        with tempfile.TemporaryDirectory(prefix="agl-environment-") as folder:
            try:
                done = await run_command(
                    self._environment.command("run"),
                    folder=Path(folder),
                    environment={**base_environment(), **endpoint_variables(llm), "PYTHONPATH": module_path()},
                    stdin=json.dumps(task).encode(),
                    limits=Limits(),
                    captured=captured,
                    adopting=True,
                )
                ended = done.exit_code
            finally:
                said = {"stdout": captured.stdout.text(), "stderr": captured.stderr.text()}
                emit_annotation({"program": {"exit_code": ended, **said}})
        rewards = self._rewards(done.stdout, done.stderr, done.exit_code)
        emit_reward(rewards, self._key(rewards))

    def _rewards(self, stdout: str, stderr: str, code: int) -> dict[str, float]:
        """What the worker printed. Raises ExecutorError where that is no reward."""
        last = next((line for line in reversed(stdout.splitlines()) if line.startswith("{")), "")
        try:
            found = json.loads(last) if code == 0 else {}
            if "error" in found:
                raise ExecutorError(f"{self._environment.name} has no reward: {found['error']}")
            return {name: checked_reward(value) for name, value in found["rewards"].items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            said = stderr.strip()[-800:]
            raise ExecutorError(f"{self._environment.name} ended with exit code {code} and no reward. {said}") from None

    def _key(self, rewards: Mapping[str, float]) -> str:
        """The name of the number that trains."""
        wanted = self._environment.reward_key
        if wanted is None and rewards:
            return next(iter(rewards))
        if wanted is None or wanted not in rewards:
            named = f" {wanted!r}" if wanted else ""
            raise ExecutorError(f"There is no reward{named}: there are {', '.join(rewards) or 'none'}.")
        return wanted
