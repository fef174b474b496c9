"""`Program`: an agent that is any program, in any language, without a changed line.

Each attempt runs the command in a working directory of its own. The task arrives on stdin, in a file or in an
environment variable; the endpoint arrives in the variables that the usual clients read; the reward is the program's
last line, a file, or what a grader says.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentlightning.arguments import explained, of_its_kinds
from agentlightning.emitter import emit_annotation
from agentlightning.errors import AgentError, ConfigError, DeadlineError, ExecutorError, JudgeError, RewardError
from agentlightning.files import copy_tree, remove_tree
from agentlightning.keys import ALL_SCOPES, REWARDS
from agentlightning.litagent import placeholders, view
from agentlightning.litagent.isolation import Container, Isolation, base_environment, check_isolation, isolated
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent, with_llm
from agentlightning.litagent.kubernetes import AttemptWork, Kubernetes, run_job
from agentlightning.litagent.litagent import LitAgent
from agentlightning.litagent.process import Captured, Finished, Limits, run_command
from agentlightning.litagent.program_words import (
    NOT_POSTED,
    check_grader,
    ended_badly,
    missed,
    missing_script,
    printed_too,
    shown,
    without_reward,
)
from agentlightning.litagent.shared_folder import shared_in_container, shared_outside
from agentlightning.tracer.trace import current_trace
from agentlightning.types import LLM, AttemptedRollout, NamedResources, Span
from agentlightning.types.reward import checked_reward

logger = logging.getLogger(__name__)

TaskAs = Literal["stdin", "file", "env"]
RewardFrom = Literal["last_line", "file", "http"]


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """What a grader sees of a program that ended."""

    task: Any
    """The rollout's task."""
    stdout: str
    """What it printed; of very long output the beginning and the end."""
    stderr: str
    """The same for the error stream."""
    exit_code: int
    """0 where it ended well; negative: the signal that killed it."""
    workspace: Path
    """The attempt's working directory, as the program left it."""
    spans: Sequence[Span]
    """The attempt's trace so far."""


Grader = Callable[[ProgramRun], Any]


class Program(LitAgent[Any]):
    """An agent that is a command.

    Args:
        command: Arguments, or one string that is split as a shell would (no shell runs), or the name of a known agent
            (`agl agents` lists them). `{task.field}` in an argument stands for a field of the task, `{task}` for all
            of it. Arguments that name files here are made absolute, because the command runs in a folder of its own.
        task_as: "stdin" (JSON), "file" (JSON, its path in AGL_TASK_FILE), or "env" (JSON in AGL_TASK); stdin, if the
            command takes nothing of its task as an argument.
        reward: "last_line" of stdout: a number, or JSON with a "reward"; "file": the same, written to the path in
            AGL_REWARD_FILE; or "http": POST {"reward": number} to AGL_REWARD_URL with the API key (the last one
            counts). Not used with a grader.
        grader: A command (given as `command` is) or a function of `ProgramRun`, sync or async, that returns the
            reward. A command gets the run as JSON on stdin and prints the reward in its last line; it runs in an
            empty folder, isolated as the program is, and `workspace` in the JSON says where it finds the program's
            (read-only in bubblewrap, a copy in a container). A grader that fails ends the attempt as `judge_error`.
        env: Further environment variables of the program.
        grader_env: Further environment variables of a grader that is a command; the program does not see them.
        files: A folder that is copied into each working directory.
        workspaces: Where working directories are made, and kept; None makes temporary ones.
        limits: What one attempt may use.
        isolation: "bubblewrap" or a `Bubblewrap`, a `Container` command, or a `Kubernetes` cluster whose Jobs run it;
            None runs it as the user that you are.
    """

    no_reward = NOT_POSTED

    @of_its_kinds
    @explained
    def __init__(
        self,
        command: Sequence[str] | str,
        *,
        task_as: TaskAs | None = None,
        reward: RewardFrom = "last_line",
        grader: Sequence[str] | str | Grader | None = None,
        env: Mapping[str, str] | None = None,
        grader_env: Mapping[str, str] | None = None,
        files: str | Path | None = None,
        workspaces: str | Path | None = None,
        limits: Limits | None = None,
        isolation: Isolation = None,
        trained_agents: str | None = None,
    ) -> None:
        super().__init__(trained_agents=trained_agents)
        if task_as not in (None, "stdin", "file", "env"):
            raise ConfigError(f"task_as is {task_as!r}; it can be 'stdin', 'file' or 'env'.")
        if reward not in ("last_line", "file", "http"):
            raise ConfigError(f"reward is {reward!r}; it can be 'last_line', 'file' or 'http', or give a grader.")
        if reward != "last_line" and grader is not None:
            raise ConfigError(f"With a grader reward={reward!r} would have no effect (--reward). Give one of the two.")
        if grader_env and (grader is None or callable(grader)):
            raise ConfigError("grader_env is for a grader that is a command.")
        self._known = KNOWN_AGENTS.get(command) if isinstance(command, str) else None
        if self._known is not None:
            _check_known(self._known, rewards=grader is not None or reward != "last_line")
        check_isolation(isolation, {"files": files, "workspaces": workspaces, "limits": limits})
        _check_folders(files, workspaces)
        here = not isinstance(isolation, Kubernetes)  # else names of files are those of the image
        self.command = list(self._known.command) if self._known else _arguments(command, here=here)
        placeholders.check_shell(self.command)
        placeholders.check_places(self.command)
        check_grader(grader)
        self._task_as = task_as or (None if placeholders.has_places(self.command) else "stdin")
        self._reward = reward
        self._grader = grader if grader is None or callable(grader) else _arguments(grader, here=here)
        self._env = dict(env or {})
        self._grader_env = dict(grader_env or {})
        self._files = Path(files) if files else None
        self._workspaces = Path(workspaces) if workspaces else None
        self._limits = limits or Limits()
        self._isolation: Isolation = isolation
        self._warned = False

    @property
    def shared_state(self) -> str | None:
        if isinstance(self._isolation, Container):
            return shared_in_container(self._isolation.command)
        return shared_outside(self.command) if self._isolation is None else None

    @property
    def key_scopes(self) -> Sequence[str]:
        """A program writes rewards over HTTP only where they are taken from there."""
        takes_them = self._reward == "http" and self._grader is None
        return ALL_SCOPES if takes_them else [scope for scope in ALL_SCOPES if scope != REWARDS]

    def check_task(self, task: Any) -> None:
        """Raises ConfigError for a task that the program cannot be given."""
        placeholders.fill(self.command, task)
        length = len(json.dumps(task)) if self._task_as == "env" else 0
        if length > _MOST_VARIABLE:
            raise ConfigError(
                f"The task has {length:,} bytes, and an environment variable holds {_MOST_VARIABLE:,}. Give it another "
                "way: task_as='file' or task_as='stdin' (--task-as)."
            )

    def check_machine(self) -> None:
        """Raises ConfigError for a program or a script that is not there."""
        if self._isolation is None and self._files is None:
            _check_scripts(self.command, self._grader, self._env, self._grader_env)
            _check_line_ends([self.command[0], *(self._grader[:1] if isinstance(self._grader, list) else ())])

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> float | None:
        async with self._workspace(rollout) as folder:
            notes = folder / ".agl"  # beside the program's own files, out of their way
            notes.mkdir()
            self.check_machine()
            self.check_task(task)
            command, llm = placeholders.fill(self.command, task), first_llm(resources)
            environment = {**self._inherited(), **endpoint_variables(llm)}
            if self._known is not None:
                command = self._prepare(self._known, llm, notes / "home", environment, task)
            environment.update(self._env)
            environment["AGL_REWARD_FILE"] = str(notes / "reward")
            if "OPENAI_BASE_URL" in environment:
                environment["AGL_REWARD_URL"] = environment["OPENAI_BASE_URL"].rstrip("/") + "/reward"
            text = json.dumps(task)
            if self._task_as == "env":
                environment["AGL_TASK"] = text
            elif self._task_as == "file":
                (notes / "task.json").write_text(text)
                environment["AGL_TASK_FILE"] = str(notes / "task.json")
            stdin = text.encode() if self._task_as == "stdin" else b""
            finished = await self._run(rollout, command, folder, environment, stdin)
            if self._grader is not None:
                return await self._grade(rollout, task, finished, folder)
            if self._reward == "last_line":
                return parse_reward(finished.stdout, finished.stderr)
            if not self._warned and (words := printed_too(finished.stdout, self._reward)) is not None:
                self._warned = True
                logger.warning("%s", words)
            return _reward_file(folder) if self._reward == "file" else None

    @staticmethod
    def _prepare(agent: KnownAgent, llm: LLM | None, home: Path, environment: dict[str, str], task: Any) -> list[str]:
        """The command of a known agent, which has a home of its own."""
        if llm is None:
            raise AgentError(f"{agent.name} needs a model, and the rollout's resources have none.")
        home.mkdir()
        environment.update({name: with_llm(value, llm) for name, value in agent.environment.items()})
        environment["HOME"] = str(home)
        return placeholders.fill([with_llm(argument, llm) for argument in agent.command], task)

    async def _run(
        self,
        rollout: AttemptedRollout,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        stdin: bytes,
    ) -> Finished:
        """The program's run; what it wrote becomes a span of the attempt, however it ended."""
        captured = Captured.empty()
        ended: dict[str, Any] = {"exit_code": None}
        try:
            readable = sorted(view.of_command([self._known.program])) if self._known is not None else ()
            finished = await self._execute(
                rollout, "program", command, folder, environment, stdin, self._limits, captured, readable
            )
            ended = {"exit_code": finished.exit_code, "seconds": finished.seconds}
        finally:
            written = {"stdout": captured.stdout.text(), "stderr": captured.stderr.text()}
            sizes = {"stdout_bytes": captured.stdout.size, "stderr_bytes": captured.stderr.size}
            emit_annotation({"program": {"command": shlex.join(command), **ended, **written, **sizes}})
        if finished.exit_code != 0:
            reward = "grader" if self._grader is not None else self._reward
            printed = finished.stdout, finished.stderr
            words = ended_badly(finished.exit_code, *printed, reward=reward, folder=folder, files=self._files)
            stderr = finished.stderr.replace(f"{folder}/", "")
            raise AgentError("\n".join([words, *missed(stderr, environment, self.command)]))
        return finished

    async def _execute(
        self,
        rollout: AttemptedRollout,
        part: Literal["program", "grader"],
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        stdin: bytes,
        limits: Limits,
        captured: Captured | None = None,
        readable: Sequence[Path] = (),
        left: Path | None = None,
    ) -> Finished:
        """Run a command where programs run, to its end."""
        if isinstance(self._isolation, Kubernetes):
            work = AttemptWork.of(rollout, part, command, folder, environment, stdin)
            return await run_job(self._isolation, work, folder=folder, limits=limits, captured=captured)
        async with isolated(self._isolation, command, folder, environment, readable, left) as wrapped:
            return await run_command(
                wrapped.command,
                folder=folder,
                environment=wrapped.environment,
                stdin=stdin,
                limits=limits,
                captured=captured,
                adopting=self._isolation is None,
            )

    def _inherited(self) -> Mapping[str, str]:
        """What a command sees of our environment; in an image it has the image's."""
        return {} if isinstance(self._isolation, Kubernetes | Container) else base_environment()

    async def _grade(self, rollout: AttemptedRollout, task: Any, finished: Finished, folder: Path) -> float:
        trace = current_trace()
        spans = trace.spans if trace else []
        run = ProgramRun(task, finished.stdout, finished.stderr, finished.exit_code, folder, spans)
        try:
            if callable(self._grader):
                result = await asyncio.to_thread(self._grader, run)
                return checked_reward(await result if inspect.isawaitable(result) else result)
            graded = await self._run_grader(rollout, run)
            if graded.exit_code != 0:
                printed = shown(graded.stderr, folder, self._files)
                advice = missed(
                    graded.stderr, {**self._inherited(), **self._grader_env}, self._grader or (), "grader_env"
                )
                raise JudgeError(
                    "\n".join([f"The grader ended with {_exit(graded.exit_code)}.", printed, *advice]).rstrip()
                )
            return parse_reward(graded.stdout, graded.stderr)
        except (JudgeError, ExecutorError, DeadlineError):
            raise
        except Exception as error:  # a grader is user code; its failure is not the agent's
            raise JudgeError(f"The grader failed: {type(error).__name__}: {error}") from error

    async def _run_grader(self, rollout: AttemptedRollout, run: ProgramRun) -> Finished:
        """Not in the program's folder, where it may have left what the grader would load."""
        assert self._grader is not None
        assert not callable(self._grader)
        with _temporary_folder("agl-grader-") as folder:
            workspace = run.workspace
            if isinstance(self._isolation, Container):  # which shows one folder
                workspace = folder / "workspace"
                await asyncio.to_thread(copy_tree, run.workspace, workspace)
            given = {"task": run.task, "stdout": run.stdout, "stderr": run.stderr, "exit_code": run.exit_code}
            given |= {"workspace": str(workspace), "spans": [s.model_dump(mode="json") for s in run.spans]}
            environment, stdin = {**self._inherited(), **self._grader_env}, json.dumps(given).encode()
            return await self._execute(
                rollout, "grader", self._grader, folder, environment, stdin, Limits(), left=run.workspace
            )

    @asynccontextmanager
    async def _workspace(self, rollout: AttemptedRollout) -> AsyncIterator[Path]:
        if self._workspaces:
            self._workspaces.mkdir(parents=True, exist_ok=True)
            folder = self._workspaces / f"{rollout.rollout_id}-{rollout.attempt.attempt_id}"
            folder.mkdir()
        else:
            folder = Path(tempfile.mkdtemp(prefix="agl-program-"))
        folder = folder.resolve()
        try:
            if self._files:
                await asyncio.to_thread(shutil.copytree, self._files, folder, dirs_exist_ok=True)
            yield folder
        finally:
            if not self._workspaces:
                await asyncio.shield(asyncio.to_thread(remove_tree, folder))


_MOST_REWARD = 100_000
"""Bytes at the end of a reward's file that are read."""
_MOST_VARIABLE = 131_000
"""Bytes of one environment variable on Linux, less its name."""


@contextmanager
def _temporary_folder(prefix: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=prefix)).resolve()
    try:
        yield folder
    finally:
        remove_tree(folder)


def parse_reward(output: str, errors: str = "") -> float:
    """The reward in the last line that is not empty: a number, or a JSON object with a "reward".

    Raises AgentError if there is none, which says where it is instead: in another line, or in `errors` (its stderr).
    """
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else ""
    try:
        found = json.loads(last)
        return checked_reward(found["reward"] if isinstance(found, dict) else found, is_json=True)
    except RewardError as error:
        raise AgentError(f"The last line holds no reward: {last[:200]!r}. {error}") from None
    except (ValueError, KeyError, RecursionError):
        raise AgentError(without_reward(output, errors)) from None


def _reward_file(folder: Path) -> float:
    """Neither `.agl` nor the file in it may be a link, a pipe or a device: they are the program's to change."""
    try:
        inside = os.open(folder / ".agl", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            opened = os.open("reward", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=inside)
        finally:
            os.close(inside)
        with open(opened, "rb") as file:
            status = os.fstat(opened)
            if stat.S_ISREG(status.st_mode):
                file.seek(max(0, status.st_size - _MOST_REWARD))
                return parse_reward(file.read(_MOST_REWARD).decode(errors="replace"))
    except OSError:
        pass
    raise AgentError("The program wrote no reward to the file named by AGL_REWARD_FILE.")


def _check_known(agent: KnownAgent, *, rewards: bool) -> None:
    """Raises ConfigError where a known agent would earn nothing."""
    if not rewards:
        raise ConfigError(
            f"{agent.name} prints no reward: give a grader that looks at what it did (--grader COMMAND, or grader=…)."
        )


def _check_folders(files: str | Path | None, workspaces: str | Path | None) -> None:
    """Raises ConfigError for a folder that is not there, or is none."""
    if files and not Path(files).is_dir():
        there = "and that is a file" if Path(files).exists() else f"and there is no such folder here ({Path.cwd()})"
        raise ConfigError(
            f"files is {str(files)!r}, {there}. Give the folder that is copied into each working directory (--files)."
        )
    if workspaces and Path(workspaces).exists() and not Path(workspaces).is_dir():
        raise ConfigError(f"workspaces is {str(workspaces)!r}, and that is a file. Give a folder (--workspaces).")


def _check_scripts(
    command: Sequence[str], grader: object, env: Mapping[str, str], grader_env: Mapping[str, str]
) -> None:
    """Raises ConfigError for a program or a script that is not there: each attempt would fail for it."""
    for name, words, variables in (("program", command, env), ("grader", grader, grader_env)):
        if not isinstance(words, list):
            continue
        if shutil.which(words[0], path=variables.get("PATH")) is None:
            here = f" A file is run by what reads it: 'python {shlex.join(words)}'." if Path(words[0]).is_file() else ""
            raise ConfigError(f"There is no {name} {words[0]!r}: give a command whose first word is in PATH.{here}")
        if (script := missing_script(words)) is not None:
            raise ConfigError(
                f"The {name} is to run {script!r}, and there is no such file here ({Path.cwd()}). Give its path, or "
                "the folder that it lies in: --files FOLDER (files=…)."
            )


def _check_line_ends(command: Sequence[str]) -> None:
    """Raises ConfigError for a script with the line ends of Windows: its interpreter's name would end in a sign."""
    for word in filter(os.path.isfile, command):
        with open(word, "rb") as file:
            if file.read(2) == b"#!" and file.readline().endswith(b"\r\n"):
                raise ConfigError(
                    f"{word} has the line ends of Windows, with which it cannot be started. Save it with those of "
                    f"Unix (LF):  sed -i 's/\\r$//' {word}"
                )


def _arguments(command: Sequence[str] | str, *, here: bool) -> list[str]:
    arguments = placeholders.split(command) if isinstance(command, str) else list(command)
    if not arguments:
        raise ConfigError("The command is empty: give for example ['python', 'my_agent.py'].")
    if not here:
        return arguments
    program, *rest = arguments  # the program itself is looked for in PATH, unless it is written with a slash
    return [_absolute(program) if "/" in program else program, *map(_absolute, rest)]


def _absolute(argument: str) -> str:
    return os.path.abspath(argument) if os.path.isfile(argument) else argument


def first_llm(resources: NamedResources) -> LLM | None:
    """The first LLM of the resources."""
    return next((r for r in resources.values() if isinstance(r, LLM)), None)


def endpoint_variables(llm: LLM | None) -> dict[str, str]:
    """A model in the variables that clients read. Anthropic's and Google's clients add the version themselves."""
    if llm is None:
        return {}
    key = llm.api_key or "none"
    return {
        "OPENAI_BASE_URL": llm.endpoint,
        "OPENAI_API_BASE": llm.endpoint,
        "OPENAI_API_KEY": key,
        "OPENAI_MODEL": llm.model,
        "ANTHROPIC_BASE_URL": (plain := re.sub(r"/v1/?$", "", llm.endpoint)),
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_MODEL": llm.model,
        "GOOGLE_GEMINI_BASE_URL": plain,
        "GEMINI_API_KEY": key,
        "GEMINI_MODEL": llm.model,
    }


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
