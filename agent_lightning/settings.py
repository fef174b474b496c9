"""The server's settings: a file with the sections model, training and runtime, and variables that win over it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.family import PPO, ReinforcePP
from agentlightning.algorithm.records import names_of
from agentlightning.cli.configuration import FAMILY
from agentlightning.errors import ConfigError
from agentlightning.types import RolloutConfig


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration file: sections model, training, runtime."""

    name: str = "calc"
    algorithm: str = "grpo"
    learning_rate: float = 1e-5
    batch_size: int = 16
    """Tasks per step."""
    group_size: int = 8
    kl_coef: float = 0.0
    epochs: int = 1
    steps: int | None = None
    max_context: int = 4096
    nworkers: int = -1
    """Rollouts at a time in each client that does not say so itself; -1 is one per core of the client's machine."""
    auto_instrumentation: bool = True
    """Clients record the spans of instrumented libraries; without it, the gateway's calls are what is recorded."""
    air_enabled: bool = True
    """Clients ask the rules of `air`; their rewards go to the calls that made the tool calls."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Any other setting of the algorithm, by its name there."""


SECTIONS: Mapping[str, Sequence[str]] = {
    "model": ("name",),
    "training": (
        *("algorithm", "learning_rate", "batch_size", "group_size", "kl_coef", "epochs", "steps", "max_context"),
    ),
    "runtime": ("nworkers", "auto_instrumentation", "air_enabled"),
}
ALGORITHMS: Mapping[str, type[GRPO]] = {
    "grpo": GRPO,
    "ppo": PPO,
    "reinforce++": ReinforcePP,
    **{name.lower(): kind for name, kind in FAMILY.items()},
}
OPTIONS = frozenset(names_of(GRPO)) - {"model", "rollout_config", "learning_rate", "epochs"}
"""What the sections `model` and `training` may hold besides."""
MAX_TOKENS = 1024
"""That a rollout may sample, unless the file says otherwise: a model that is not trained yet may never stop."""
ENVIRONMENT = {
    "LIGHTNING_MODEL_PATH": "name",
    "LIGHTNING_RL_ALGORITHM": "algorithm",
    "LIGHTNING_LEARNING_RATE": "learning_rate",
    "LIGHTNING_BATCH_SIZE": "batch_size",
}


def read_settings(path: Path | None, environment: Mapping[str, str] = os.environ) -> Settings:
    """From the file, then the environment. Raises ConfigError for keys that mean nothing."""
    given: dict[str, Any] = {}
    if path is not None:
        given = _flat(_load(path), path)
    for variable, name in ENVIRONMENT.items():
        if variable in environment:
            given[name] = environment[variable]
    try:
        settings = TypeAdapter(Settings).validate_python(given)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"The setting '{wrong['loc'][0]}' is wrong: {wrong['msg']}.") from error
    if settings.nworkers == 0 or settings.nworkers < -1:
        raise ConfigError(f"The setting 'nworkers' is {settings.nworkers}: give a positive number, or -1.")
    return settings


def of_gpus(gpus: int | None) -> dict[str, Any]:
    """The settings that `--gpus` asks for: a rank of the learner on each. Raises ConfigError for no such number."""
    if gpus is None:
        return {}
    if gpus < 0:
        raise ConfigError(f"--gpus is {gpus}; give how many to train on, or 0 for the processor.")
    return {"device": "cuda" if gpus else "cpu", **({"ranks": gpus} if gpus > 1 else {})}


def make_algorithm(settings: Settings, rollout_config: RolloutConfig) -> GRPO:
    """The algorithm that the settings name. Raises ConfigError for one there is not."""
    kind = ALGORITHMS.get(settings.algorithm.lower())
    if kind is None:
        raise ConfigError(f"There is no algorithm '{settings.algorithm}'; there are {', '.join(ALGORITHMS)}.")
    options: dict[str, Any] = {"kl_coef": settings.kl_coef} if settings.kl_coef else {}
    if kind in (GRPO, ReinforcePP) and settings.air_enabled:
        options["credit"] = "return_to_go"  # so that a tool's reward goes to the call that made the tool call
    given = {
        "learning_rate": settings.learning_rate,
        "tasks_per_step": settings.batch_size,
        "group_size": settings.group_size,
        "epochs": settings.epochs,
        "steps": settings.steps,
        "max_context": settings.max_context,
        "max_tokens": MAX_TOKENS,
        **options,
        **settings.options,
    }
    return kind(model=settings.name, rollout_config=rollout_config, **given)


def _load(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("A configuration file needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration '{path}' cannot be read: {error}") from error


def _flat(sections: Any, path: Path) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for section, values in sections.items():
        known = SECTIONS.get(section)
        if known is None:
            raise ConfigError(f"{path}: there is no section '{section}'; there are {', '.join(SECTIONS)}.")
        more = set(values or {}) - set(known)
        unknown = sorted(more - (OPTIONS if section != "runtime" else frozenset()))
        if unknown:
            others = "" if section == "runtime" else ", and the settings of the algorithm (docs/configuration.md)"
            raise ConfigError(
                f"{path}: '{unknown[0]}' is no setting of '{section}'; it has {', '.join(known)}{others}."
            )
        given |= {name: value for name, value in (values or {}).items() if name not in more}
        given["options"] = {**given.get("options", {}), **{name: values[name] for name in more}}
    return given
