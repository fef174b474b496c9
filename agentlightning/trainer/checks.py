"""What the trainer is given, looked at before anything is started. Each refusal says what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agentlightning.algorithm.base import Algorithm
from agentlightning.errors import ConfigError
from agentlightning.litagent import FunctionAgent, LitAgent
from agentlightning.metrics import Sink
from agentlightning.store.base import LightningStore
from agentlightning.tracer import Tracer
from agentlightning.trainer.tasks import load_tasks
from agentlightning.types import Dataset, Hook, Resource

_PARTS: dict[str, tuple[type, str]] = {
    "algorithm": (Algorithm, "GRPO(model='calc')"),
    "store": (LightningStore, "SqliteLightningStore('store.db')"),
    "tracer": (Tracer, "OtelTracer()"),
    "resource": (Resource, "PromptTemplate(template='…', engine='f-string')"),
    "sink": (Sink, "metrics.Sink(), with your methods in a subclass of it"),
    "hook": (Hook, "Hook(), with your methods in a subclass of it"),
}


def check_parts(**parts: object) -> None:
    """Raises ConfigError for a part that is given by name, as a class, or is something else."""
    for name, value in parts.items():
        kind, example = _PARTS[name]
        if value is not None and not isinstance(value, kind):
            shown = value.__name__ if isinstance(value, type) else repr(value)
            raise ConfigError(f"{name} is {shown}, which is no {kind.__name__}. Give an object: agl.{example}.")


def as_agent(agent: LitAgent[Any] | Callable[..., Any] | None) -> LitAgent[Any]:
    """A plain function is taken as if it were decorated with `@rollout`. Raises ConfigError for what is no agent."""
    if isinstance(agent, LitAgent):
        return agent
    if isinstance(agent, type):
        raise ConfigError(f"The agent is the class {agent.__name__}; give an instance of it: {agent.__name__}(…).")
    if agent is None:
        raise ConfigError(
            "There is no agent. It may be left out where runners are elsewhere: Trainer(strategy='remote')."
        )
    if callable(agent):
        return FunctionAgent(agent)
    raise ConfigError(f"The agent must be a function or a LitAgent, not {type(agent).__name__}.")


def as_tasks(what: str, tasks: object) -> Dataset[Any]:
    """The tasks, read from a file if it is the name of one.

    Raises ConfigError for tasks that cannot be counted and taken by number.
    """
    if isinstance(tasks, str | Path):
        return load_tasks(tasks)
    if isinstance(tasks, bytes | Mapping):
        raise ConfigError(f"The {what} tasks are a {type(tasks).__name__}. Give a list with one JSON value per task.")
    if not isinstance(tasks, Dataset):
        raise ConfigError(
            f"The {what} tasks are a {type(tasks).__name__}, which has no length or cannot be read by number. "
            "Give a list of them: list(tasks)."
        )
    if len(tasks) == 0:
        return tasks
    try:
        tasks[0]
    except Exception as error:  # what other people's data sets raise
        raise ConfigError(
            f"The {what} tasks are a {type(tasks).__name__}, and reading the first as tasks[0] failed: "
            f"{type(error).__name__}: {error}. Give a list of tasks; for a pandas frame: frame.to_dict('records')."
        ) from error
    return tasks
