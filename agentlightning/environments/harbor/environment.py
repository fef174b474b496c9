"""The environment: a folder of tasks, and an agent that is started in a box for each attempt."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentlightning.emitter import emit_annotation, emit_reward
from agentlightning.environments.base import Environment, Probe
from agentlightning.environments.harbor.boxes import Box, endpoint_inside
from agentlightning.environments.harbor.engines import check_engine
from agentlightning.environments.harbor.format import HarborTask, Stage, read_task
from agentlightning.environments.harbor.pods import check_namespace
from agentlightning.environments.harbor.project import find_compose
from agentlightning.environments.harbor.registry import TaskRegistry, is_name, task_folders
from agentlightning.environments.harbor.repository import in_this_cache
from agentlightning.environments.harbor.trial import (
    TrialSettings,
    Verified,
    Worker,
    composition_of,
    do_nothing,
    run_trial,
    shown_command,
    solve,
)
from agentlightning.errors import AgentError, ConfigError, ExecutorError
from agentlightning.litagent import LitAgent, placeholders
from agentlightning.litagent.known_agents import KNOWN_AGENTS, with_llm
from agentlightning.litagent.process import Captured
from agentlightning.litagent.program import endpoint_variables, first_llm
from agentlightning.types import LLM, AttemptedRollout, NamedResources

logger = logging.getLogger(__name__)

_INSTALL_SECONDS = 360.0


def _warn_of_disk(name: str, wanted_mb: int) -> None:
    """Where a box may come to have less disk than its task asks for: nothing keeps it from more or less here."""
    place = tempfile.gettempdir()
    if (free := shutil.disk_usage(place).free >> 20) < wanted_mb:
        logger.warning(
            "%s asks for %s MiB of disk (storage_mb), and %s has %s MiB free. It runs all the same.",
            *(name, f"{wanted_mb:,}", place, f"{free:,}"),
        )


class HarborEnvironment(Environment):
    """Tasks in Harbor's format, each done by an agent in a box of its own and rewarded by the task's tests."""

    summary = "tasks in Harbor's format: an agent in a container, rewarded by the task's tests"
    tested = "harbor 0.26.0, schema 1.4"

    def __init__(
        self,
        place: str,
        *,
        agent: str | None = None,
        val: str | None = None,
        engine: str | None = None,
        container_options: Sequence[str] = (),
        variables: Sequence[str] = (),
        reward_key: str | None = None,
        time_factor: float = 1.0,
        install: bool = True,
        kubernetes_namespace: str | None = None,
        registry_path: str | None = None,
        registry_url: str | None = None,
    ) -> None:
        """
        Args:
            place: A task's folder, or one with tasks in it; or the name of a data set in a registry of Harbor, as
                NAME@VERSION or NAME, whose tasks are fetched once.
            agent: The name of a known agent (`agl agents`), or a command with `{task.prompt}` for the instruction,
                which runs in the task's box. "oracle" is the task's own solution, "nop" does nothing.
            val: A folder or a name with further tasks, to validate on.
            engine: "podman" or "docker", whichever is installed if not given; or "bubblewrap": a sandbox with the
                programs of this machine, for tasks whose Dockerfile installs nothing; or "kubernetes": a pod of a
                cluster, by kubectl, for tasks whose image the cluster can pull.
            container_options: Further options of the container engine's `run`.
            variables: Names of this machine's environment variables that tasks may read as `${NAME}`.
            reward_key: Which of a verifier's several numbers trains; `reward`, or the only one, if not given.
            time_factor: The tasks' time limits are multiplied by it.
            install: Whether a known agent that an image lacks is installed in the container, which takes a network.
            kubernetes_namespace: Where pods are made; by default kubectl's own namespace.
            registry_path: The file of a registry in which names are looked up, in place of Harbor's public one.
            registry_url: The URL of such a registry.
        """
        self.place = place
        self._folders, self._val = _folders(place, val, TaskRegistry(registry_path, registry_url))
        if engine == "kubernetes" and container_options:
            raise ConfigError("container_options are for podman and docker, not for engine=kubernetes.")
        if engine != "kubernetes" and kubernetes_namespace is not None:
            raise ConfigError("kubernetes_namespace is for engine=kubernetes.")
        self._settings = TrialSettings(
            engine=check_engine(engine),
            arguments=_words(container_options),
            namespace=check_namespace(kubernetes_namespace),
            variables=_words(variables),
            time_factor=time_factor,
        )
        self._reward_key = reward_key
        self._largest_disk_mb = 0
        self.agent = _HarborAgent(self, agent, install=install)

    @property
    def settings(self) -> TrialSettings:
        """What all attempts have in common."""
        return self._settings

    def tasks(self) -> Sequence[Any]:
        return [self._task(read_task(folder)) for folder in self._folders]

    def val_tasks(self) -> Sequence[Any]:
        return [self._task(read_task(folder)) for folder in self._val]

    def _task(self, read: HarborTask) -> Any:
        """A task as an agent is given it. Raises ConfigError where its services are refused, before anything runs."""
        if composition_of(read, self._settings) is not None:
            find_compose(self._settings.engine)
        wanted = read.file.environment.storage_mb or 0
        if self._settings.engine != "kubernetes" and wanted > self._largest_disk_mb:
            self._largest_disk_mb = wanted  # less than that is not said again
            _warn_of_disk(read.name, wanted)
        return {"name": read.name, "path": str(read.folder), "prompt": read.stages[0].instruction}

    async def probes(self, tasks: Sequence[Any]) -> AsyncIterator[Probe]:
        for task in (_read(one) for one in tasks):
            ways: list[tuple[str, Worker]] = [("nothing", do_nothing)]
            if all((stage.solution / "solve.sh").is_file() for stage in task.stages):
                ways.insert(0, ("solution", self.worker_of("oracle", task)))
            for by, worker in ways:
                yield await self._probe(task, by, worker)

    async def _probe(self, task: HarborTask, by: str, worker: Worker) -> Probe:
        began, reward, why = time.perf_counter(), None, ""
        try:
            reward = self.main_reward(await run_trial(task, worker, self._settings))
        except (ExecutorError, ConfigError, AgentError) as error:
            why = str(error)
        solved = by == "solution"
        good = reward is not None and (reward >= 1 if solved else reward < 1)
        expected = "1" if solved else "less than 1"
        seconds = time.perf_counter() - began
        return Probe(task=task.name, by=by, reward=reward, expected=expected, good=good, why=why, seconds=seconds)

    def worker_of(self, name: str, task: HarborTask) -> Worker:
        """Who works as "oracle" or "nop"."""
        if name == "nop":
            return do_nothing
        return lambda box, stage, captured: solve(task, box, stage, captured, self._settings.variables)

    def main_reward(self, found: Verified) -> float:
        """The number that trains. Raises ExecutorError where it is not clear which one that is."""
        return found.rewards[self.main_key(found)]

    def main_key(self, found: Verified) -> str:
        """The name of the number that trains."""
        wanted = self._reward_key or ("reward" if "reward" in found.rewards else None)
        if wanted is None and len(found.rewards) == 1:
            return next(iter(found.rewards))
        if wanted not in found.rewards:
            names = ", ".join(found.rewards)
            raise ExecutorError(f"The verifier gave {names}, and not {wanted or 'reward'}. Say which: reward_key=…")
        return wanted


class _HarborAgent(LitAgent[Any]):
    """Starts an agent in the box of each attempt."""

    def __init__(self, environment: HarborEnvironment, agent: str | None, *, install: bool) -> None:
        super().__init__()
        self._environment = environment
        self._install = install
        self._known = KNOWN_AGENTS.get(agent or "")
        self._name = agent
        self._command = list(self._known.command) if self._known else placeholders.split(agent or "")
        if self._command:
            placeholders.check_shell(self._command)

    @property
    def origin(self) -> tuple[str, str | None]:
        return f"harbor:{self._environment.place}", None

    def check_task(self, task: Any) -> None:
        if not isinstance(task, Mapping) or "path" not in task:
            raise ConfigError(f"A task of harbor: names its folder as path, and not {json.dumps(task)[:200]}.")
        read = _read(task)
        if not self._command:
            raise ConfigError("harbor: needs an agent: --agent codex (agl agents), or a command with {task.prompt}.")
        if self._name not in ("oracle", "nop"):
            for stage in read.stages:
                placeholders.fill(self._command, {**task, "prompt": stage.instruction})

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> float | None:
        self.check_task(task)
        read = _read(task)
        llm = first_llm(resources)
        if self._name in ("oracle", "nop"):
            worker = self._environment.worker_of(self._name, read)
        elif llm is None:
            raise AgentError("The rollout's resources have no model for the agent.")
        else:
            worker = partial(self._work, dict(task), llm)
        program = self._known.program if self._known else (self._command[0] if self._command else "")
        found = await run_trial(
            read,
            worker,
            self._environment.settings,
            prepare=self._install_known,
            endpoint=llm.endpoint if llm else None,
            uses=[program] if program else [],
            record=emit_annotation,
        )
        emit_reward(found.rewards, self._environment.main_key(found))
        return None

    async def _work(self, task: Mapping[str, Any], llm: LLM, box: Box, stage: Stage, captured: Captured) -> int:
        environment = endpoint_variables(llm)
        if box.has_endpoint_inside:
            environment = endpoint_inside(environment)
        if self._known is not None:
            environment |= {name: with_llm(value, llm) for name, value in self._known.environment.items()}
        filled = placeholders.fill(
            [with_llm(word, llm) for word in self._command], {**task, "prompt": stage.instruction}
        )
        emit_annotation({"command": shown_command(filled)})
        done = await box.run(filled, environment=environment, user=stage.agent.user, captured=captured)
        if done.exit_code == 127 and self._known is not None:
            raise ExecutorError(f"{self._known.name} is not in the task's box: {done.stderr.strip()[-500:]}")
        return done.exit_code

    async def _install_known(self, box: Box, stage: Stage) -> None:
        """Install a known agent that the box lacks. Raises ExecutorError where that fails."""
        if self._known is None:
            return
        with box.reaching(box.egress and box.egress.first):
            if (
                await box.shell(f"command -v {shlex.quote(self._known.program)}", user=stage.agent.user)
            ).exit_code == 0:
                return
            needs = f"{self._known.name} is not installed in the task's box. Its image needs:  {self._known.install}"
            if not self._install or self._environment.settings.engine == "bubblewrap":
                raise ExecutorError(needs)
            done = await box.shell(f"timeout {_INSTALL_SECONDS:g} {self._known.install}", user=0)
            if done.exit_code != 0:
                raise ExecutorError(f"{needs}\nThat failed: {done.stderr.strip()[-500:]}")


def _read(task: Mapping[str, Any]) -> HarborTask:
    """The task that an agent is given, also where another machine fetched it."""
    return read_task(in_this_cache(Path(task["path"])))


def _folders(place: str, val: str | None, registry: TaskRegistry) -> tuple[list[Path], list[Path]]:
    """The folders of the tasks, and of those to validate on."""
    if registry.is_given and not any(is_name(one, registry) for one in (place, val) if one):
        raise ConfigError(f"{registry.shown} has no effect: harbor:{place} is a folder, and no name in a registry.")
    return task_folders(place, registry), task_folders(val, registry) if val else []


def _words(given: Sequence[str] | str) -> Sequence[str]:
    """Several words, as a list or as one text."""
    return shlex.split(given) if isinstance(given, str) else [str(one) for one in given]
