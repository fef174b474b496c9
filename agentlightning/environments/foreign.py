"""Environments whose package runs in an interpreter of its own, since its versions fight with ours.

A worker is a script that imports that package and nothing of ours. `worker.py list NAME` prints its tasks, each as a
line of JSON, those that the environment itself validates on with `"split": "validation"`. `worker.py run NAME` reads
one of them on stdin, works on it, and prints as its last line `{"rewards": {name: number}}`, or `{"error": text}` where
there is none. It finds its model in the usual variables.

Where functions see the rollouts of a group together, the list begins with `{"rewards_groups": true}`. A task that comes
with `"rewarded_later": true` is rewarded without them, and `group_state.json` in the working directory says what they
are to be shown. `worker.py reward NAME` reads `{"task": …, "states": [...]}` and prints `{"group": [{name: number}]}`,
what they give to each; of the total, what they add to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.environments.base import Environment, Probe
from agentlightning.errors import AgentError, ConfigError, ExecutorError, RewardError, debugging
from agentlightning.files import reason_of_file
from agentlightning.litagent import LitAgent
from agentlightning.litagent.isolation import base_environment, engine_environment
from agentlightning.litagent.process import Captured, Finished, Limits, run_command
from agentlightning.litagent.program import endpoint_variables, first_llm
from agentlightning.types import LLM, AttemptedRollout, GroupReward, NamedResources, Sibling
from agentlightning.types.finding import counted
from agentlightning.types.names import REWARDED_LATER
from agentlightning.types.reward import checked_reward

_LIST_SECONDS = 300.0
_STATE_FILE = "group_state.json"
_STATE = "agentlightning.environment.group_state"
"""On an annotation: what the functions of a group are shown of the rollout, as JSON."""
_MOST_STATE = 4_000_000
"""Bytes of it."""


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
        self._rewards_groups = False
        self.agent = _Worker(self)

    def command(self, what: str) -> list[str]:
        """The worker's, to list or to run."""
        return [self._python, str(self.worker), what, self.name, self._settings]

    @property
    def rewards_groups(self) -> bool:
        """Whether rollouts of a task are rewarded together, too."""
        self._split()
        return self._rewards_groups

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
                f"{self.scheme}: val_tasks is {self._val}, and {counted(len(trained), 'task is', 'tasks are')} there"
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
                # A judge's client is made as tasks are listed; what it asks later goes where the model's calls go.
                env={"OPENAI_API_KEY": "none", **os.environ, "PYTHONPATH": module_path()},
            )
        except OSError as error:
            raise ConfigError(
                f"{self.scheme}: {self._python} cannot be run (python=…): {reason_of_file(error)}"
            ) from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{self.scheme}: {self.name} lists no tasks within {_LIST_SECONDS:g} s.") from None
        if done.returncode != 0:
            words = done.stderr.strip()[-800:] if debugging() else _what_was_raised(done.stderr)
            missing = self._what_is_missing(done.stderr)
            arguments = " Its arguments: --env-option arguments='{…}', as JSON." if _ARGUMENTS.search(words) else ""
            raise ConfigError(f"{self.scheme}: {self.name} cannot be loaded.{missing}\n{words}{arguments}")
        listed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if listed and "rewards_groups" in listed[0]:
            self._rewards_groups = listed.pop(0)["rewards_groups"]
        return listed

    def _what_is_missing(self, stderr: str) -> str:
        """Which package to install where an import failed: the scheme's own, or what the environment itself imports."""
        absent = _ABSENT.findall(stderr)
        if not absent:
            return ""
        module = absent[-1].partition(".")[0]
        own = {_as_module(word) for word in (*self.install.replace(",", " ").split(), self.name)}
        if module in own:
            return f" {self._python} needs  {self.install}"
        return f" {self.name} imports {module}: install the package that holds it for {self._python}."

    async def probes(self, tasks: Sequence[Any]) -> AsyncIterator[Probe]:
        began = time.perf_counter()
        count = sum(map(len, await asyncio.to_thread(self._split)))
        seconds = time.perf_counter() - began
        yield Probe(
            task=counted(count, "task"),
            by="loading",
            reward=None,
            expected="tasks",
            good=count > 0,
            why="",
            seconds=seconds,
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

    @property
    def group_reward(self) -> GroupReward | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The environment's, where it rewards groups."""
        return self._reward_group if self._environment.rewards_groups else None

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> None:
        llm = first_llm(resources)
        if llm is None:
            raise AgentError("The rollout's resources have no model.")
        later = bool(rollout.metadata.get(REWARDED_LATER))
        captured, ended = Captured.empty(), None
        with tempfile.TemporaryDirectory(prefix="agl-environment-") as folder:
            try:
                done = await self._run("run", {**task, "rewarded_later": later}, Path(folder), llm, captured)
                ended = done.exit_code
            finally:
                words = {"stdout": captured.stdout.text(), "stderr": captured.stderr.text()}
                emit_annotation({"program": {"exit_code": ended, **words}})
            rewards = self._rewards(self._printed(done, "rewards"))
            state = Path(folder) / _STATE_FILE
            if later and state.exists():
                emit_annotation({_STATE: self._state(state)})
        emit_reward(rewards, self._key(rewards))

    async def _run(
        self, what: str, given: Any, folder: Path, llm: LLM | None = None, captured: Captured | None = None
    ) -> Finished:
        """Let the worker do something with what it reads."""
        variables = endpoint_variables(llm) if llm else {}
        return await run_command(
            self._environment.command(what),
            folder=folder,
            # Workers open containers of their own: sandboxes of inspect, runtimes of verifiers.
            environment={**base_environment(), **engine_environment(), **variables, "PYTHONPATH": module_path()},
            stdin=json.dumps(given).encode(),
            limits=Limits(),
            captured=captured or Captured.empty(),
            adopting=True,
        )

    def _state(self, file: Path) -> str:
        if file.stat().st_size > _MOST_STATE:
            raise ExecutorError(
                f"{self._environment.name} shows more than {_MOST_STATE:,} bytes of a rollout to its group."
            )
        return file.read_text()

    async def _reward_group(self, siblings: Sequence[Sibling]) -> list[Mapping[str, float]]:
        """What its functions of groups give to each, added to what it has earned by itself."""
        kept = [[span.attributes[_STATE] for span in s.spans if _STATE in span.attributes] for s in siblings]
        if not all(kept):
            raise ExecutorError("A rollout was recorded without what the functions of its group are shown of it.")
        given = {"task": siblings[0].task, "states": [json.loads(str(states[-1])) for states in kept]}
        with tempfile.TemporaryDirectory(prefix="agl-environment-") as folder:
            found = self._printed(await self._run("reward", given, Path(folder)), "group")
        pairs = zip(siblings, map(self._rewards, found), strict=True)
        return [self._together(sibling.rewards, added) for sibling, added in pairs]

    def _together(self, own: Mapping[str, float], added: Mapping[str, float]) -> dict[str, float]:
        total = next(iter(added))
        whole = {**own, **added, total: own.get(total, 0.0) + added[total]}
        key = self._key({total: whole[total], **whole})
        return {key: whole[key], **whole}

    def _printed(self, done: Finished, what: str) -> Any:
        """What the worker printed under this name. Raises ExecutorError where it printed none."""
        last = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), "")
        try:
            found = json.loads(last) if done.exit_code == 0 else {}
            if "error" in found:
                raise ExecutorError(f"{self._environment.name} has no reward: {found['error']}")
            return found[what]
        except (ValueError, KeyError, TypeError):
            words = (done.stderr.strip() or done.stdout.strip())[-800:]
            raise ExecutorError(
                f"{self._environment.name} ended with exit code {done.exit_code} and no reward. {words}"
            ) from None

    def _rewards(self, printed: Any) -> dict[str, float]:
        try:
            return {name: checked_reward(value) for name, value in printed.items()}
        except (RewardError, AttributeError):
            raise ExecutorError(f"{self._environment.name} printed what is no reward: {printed!r:.200}") from None

    def _key(self, rewards: Mapping[str, float]) -> str:
        """The name of the number that trains."""
        wanted = self._environment.reward_key
        if wanted is None and rewards:
            return next(iter(rewards))
        if wanted is None or wanted not in rewards:
            named = f" {wanted!r}" if wanted else ""
            raise ExecutorError(f"There is no reward{named}: there are {', '.join(rewards) or 'none'}.")
        return wanted


def _as_module(package: str) -> str:
    return package.rpartition("/")[2].replace("-", "_")


def _what_was_raised(stderr: str) -> str:
    """What a process said at its end: of a traceback, the error with all lines of its message, without the frames; of
    several errors in one, each. What failed when the process ended is not why it did."""
    stderr = re.split(r"^Exception ignored ", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    _, traceback, words = stderr.strip().rpartition("Traceback (most recent call last):\n")
    lines = words.splitlines()
    message = list(dropwhile(lambda line: line.startswith((" ", "+")), lines)) if traceback else lines[-1:]
    if not message or "sub-exception" in message[-1]:
        parts = [line.strip("| ") for line in stderr.splitlines() if _OF_A_GROUP.match(line)]
        message += [part for part in parts if "sub-exception" not in part]
    return "\n".join(line for line in message if "For further information visit" not in line)[-800:]


_ARGUMENTS = re.compile(r"missing \d+ required (positional|keyword-only) argument|unexpected keyword argument")
_ABSENT = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_OF_A_GROUP = re.compile(r"\s+\| [A-Za-z_][\w.]*: ")
"""The error of one in a group, as a traceback shows it."""
