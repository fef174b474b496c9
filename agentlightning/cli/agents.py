"""What `--agent` means: a function in a file, a known agent, or a command."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

from agentlightning.cli.options import EnvironmentOptions, ProgramOptions, value_in
from agentlightning.environments import Environment, load_environment
from agentlightning.errors import ConfigError
from agentlightning.files import meant_by
from agentlightning.litagent import Kubernetes, LitAgent, Program
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent
from agentlightning.litagent.placeholders import split
from agentlightning.trainer.example import agents_in, load_agent, only_defines
from agentlightning.trainer.tasks import load_tasks

_READERS: Mapping[str, str | None] = {
    **{".js": "node", ".mjs": "node", ".cjs": "node", ".ts": "npx tsx", ".rb": "ruby", ".pl": "perl", ".php": "php"},
    **dict.fromkeys((".json", ".jsonl", ".yaml", ".yml", ".toml", ".csv", ".txt", ".md", ".parquet")),
}
"""What runs files with these endings, all others by a shell; None: nothing does."""


def find_agent(reference: str, options: ProgramOptions | None = None) -> LitAgent[Any]:
    """`path/to/file.py:name` is a function or a LitAgent in that file; the name of a known agent is that one; anything
    else is a command.

    Raises ConfigError for what is neither.
    """
    given = {} if options is None else _settings_of(options)
    if reference in KNOWN_AGENTS:
        _check_installed(KNOWN_AGENTS[reference], here=not isinstance(given.get("isolation"), Kubernetes))
        return Program(reference, **given)
    file, _, name = reference.rpartition(":")
    if not (file.endswith(".py") and name.isidentifier()):
        _check_command(reference, here=not isinstance(given.get("isolation"), Kubernetes))
        return Program(reference, **given)
    if not Path(file).expanduser().is_file():
        meant = meant_by(Path(file).expanduser())
        raise ConfigError(f"There is no file '{file}' with an agent.{meant} Give file.py:name, or a command.")
    if given:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')} is for programs, and {reference} is a function.")
    return load_agent(reference)


class Work(NamedTuple):
    """An agent and what it works on."""

    agent: LitAgent[Any]
    tasks: list[Any]
    val_tasks: list[Any] | None


def find_work(
    agent: str | None,
    tasks: Path | None,
    environment: EnvironmentOptions,
    program: ProgramOptions | None = None,
    val_tasks: Path | None = None,
) -> Work:
    """What is named, or what an environment brings. Raises ConfigError where there is none."""
    found = environment_of(environment, agent, program)
    if found is None and (agent is None or tasks is None):
        missing = "tasks: --tasks FILE" if agent else "agent: --agent with file.py:name of a function, or a command"
        raise ConfigError(f"Say which {missing}; or name an environment that brings tasks, as in --env gym:Taxi-v4.")
    if found is None:
        assert agent is not None
        assert tasks is not None
        return Work(find_agent(agent, program), load_tasks(tasks), load_tasks(val_tasks) if val_tasks else None)
    found.check()
    return Work(
        found.agent,
        list(found.tasks() if tasks is None else load_tasks(tasks)),
        (list(found.val_tasks()) or None) if val_tasks is None else load_tasks(val_tasks),
    )


def environment_of(
    options: EnvironmentOptions, agent: str | None, program: ProgramOptions | None = None
) -> Environment | None:
    """The environment that `--env` names, which `agent` works in; None where none is named."""
    given = dict(_named(text) for text in options.env_option)
    if options.env is None:
        if given:
            raise ConfigError(f"--env-option {options.env_option[0]} has no effect: it is for --env.")
        return None
    if program is not None and (others := _settings_of(program)):
        name = next(iter(others)).replace("_", "-")
        raise ConfigError(f"--{name} is for programs, and --env has settings of its own: --env-option NAME=VALUE.")
    return load_environment(options.env, agent=agent, **given)


def _named(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"--env-option {text}: give NAME=VALUE, for example tasks=100.")
    return name, value_in(value)


def _settings_of(options: ProgramOptions) -> dict[str, Any]:
    """The settings that were given, as `Program` takes them."""
    given = {name: value for name, value in vars(options).items() if value is not None and name != "isolation_option"}
    isolation = isolation_of(options.isolation, options.isolation_option)
    return given if isolation is None else {**given, "isolation": isolation}


def isolation_of(kind: str | None, settings: Sequence[str]) -> Literal["bubblewrap"] | Kubernetes | None:
    """`--isolation`, with its `--isolation-option NAME=VALUE`s: text, and JSON where the setting is no text."""
    if kind != "kubernetes":
        if settings:
            raise ConfigError(f"--isolation-option {settings[0]} has no effect: it is for --isolation kubernetes.")
        return "bubblewrap" if kind else None
    given: dict[str, Any] = {"image": ""}
    others = {field.name for field in fields(Kubernetes) if not str(field.type).startswith("str")}
    for text in settings:
        name, equals, value = text.partition("=")
        try:
            given[name] = json.loads(value) if name in others else value
        except ValueError:
            equals = ""
        if not equals:
            raise ConfigError(f"--isolation-option {text}: give NAME=VALUE, for example memory=2Gi or user=1000.")
    return Kubernetes(**given)


def _check_command(command: str, *, here: bool) -> None:
    """Raises ConfigError for one whose program is not there, before a model is loaded for it. What is in an image is
    not known here."""
    words = split(command)
    if not words:
        raise ConfigError("--agent is empty: give a command, file.py:name, or the name of an agent (agl agents).")
    program = words[0]
    if not here:
        return
    if program.endswith(".py") and not os.access(program, os.X_OK):
        names = agents_in(Path(program)) or ["name of a function in it"]
        raise ConfigError(
            f"Give {' or '.join(f'{program}:{name}' for name in names)}, or the command 'python {command}'."
        )
    script = Path(words[1]) if len(words) > 1 and re.fullmatch(r"python[\d.]*", Path(program).name) else None
    if script is not None and (names := agents_in(script)) and only_defines(script):
        raise ConfigError(f"{script} defines an agent and runs nothing. Give the agent itself: {script}:{names[0]}")
    if shutil.which(program) is None and Path(program).is_file():
        reader = _READERS.get(Path(program).suffix.lower(), "sh")
        if reader is None:
            raise ConfigError(
                f"'{program}' is a file of data, and an agent is code: give file.py:name of a function, or the command "
                f"that reads it, such as 'python my_agent.py {program}'."
            )
        raise ConfigError(
            f"'{program}' may not be run as a program. Give the program that reads it, such as '{reader} {command}', "
            f"or allow it: chmod +x {program}"
        )
    if shutil.which(program) is None:
        raise ConfigError(f"There is no program '{program}'. {_meant(program)}")


def _check_installed(agent: KnownAgent, *, here: bool) -> None:
    if here and shutil.which(agent.program) is None:
        raise ConfigError(f"{agent.name} is not installed: there is no '{agent.program}'. Try  {agent.install}")


def _meant(program: str) -> str:
    """What to give instead of what is neither a program nor file.py:name."""
    file, colon, name = program.partition(":")
    if colon and file.endswith(".py"):
        return f"Behind {file}: stands the name of a function in it, without brackets: {file}:agent."
    if file.endswith(".ipynb"):
        return "An agent stands in a file of Python: jupyter nbconvert --to script writes the notebook as one."
    if colon and re.fullmatch(r"[\w.]+", file):
        path = file.replace(".", "/") + ".py"
        return f"An agent is named by its file: {path}:{name or 'agent'}."
    stem, _, name = program.rpartition(".")
    if stem and Path(path := stem.replace(".", "/") + ".py").is_file():
        return f"An agent is named by its file: {path}:{name}."
    if (agent := program.lower()) in KNOWN_AGENTS:
        return f"The agent that has a name here is {agent}."
    if begun := [name for name in KNOWN_AGENTS if name.partition("-")[0] == agent]:
        return f"The agent that has a name here is {begun[0]}."
    if Path(program).is_dir():
        return "It is a folder: give file.py:name of a function in one of its files, or a command."
    return "Give a command whose program is in PATH, or file.py:name."
