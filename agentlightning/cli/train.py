"""`agl train`: the GRPO family on any agent, with settings from a file and the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from agentlightning.cli.configuration import backend_settings, make_algorithm, told_settings
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError
from agentlightning.gateway import Provider
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import RolloutConfig

console = Console(highlight=False, soft_wrap=True)


def show_config(
    algorithm: str | None,
    model: str | None,
    config: Path | None,
    settings: Sequence[str],
    backend: str | None,
    backend_options: Sequence[str],
    trust: bool,
) -> None:
    """Print all settings of the algorithm that would train, in the form that `--config` reads."""
    made = make_algorithm(algorithm, model, config, settings, trust=trust, **backend_settings(backend, backend_options))
    typer.echo(json.dumps(told_settings(made), indent=2))


def train_agent(
    agent: LitAgent[Any] | None,
    tasks: list[Any],
    val_tasks: list[Any] | None,
    *,
    algorithm: str | None,
    model: str | None,
    config: Path | None,
    settings: Sequence[str],
    backend: str | None,
    backend_options: Sequence[str],
    timeout: float | None,
    concurrency: int,
    n_runners: int,
    strategy: str | None,
    models: Mapping[str, Provider],
    run_dir: Path | None,
    resume: Path | None,
    log: Sequence[str],
    trust: bool,
) -> None:
    """Train, then say what became better and where it is. Raises ConfigError where nobody would run the agent."""
    others = {"rollout_config": RolloutConfig(timeout_seconds=timeout), **backend_settings(backend, backend_options)}
    chosen = make_algorithm(algorithm, model, config, settings, trust=trust, **others)
    if agent is None and strategy != "remote" and (chosen.samples or val_tasks is not None):
        raise ConfigError("Say which agent to train: --agent AGENT; or --remote, if runners elsewhere have it.")
    trainer = Trainer(
        algorithm=chosen,
        concurrency=concurrency,
        n_runners=n_runners,
        strategy=strategy,
        models=models,
        run_dir=run_dir,
        resume=resume,
        sinks=log,
    )
    result = trainer.fit(agent, tasks, val_tasks)
    if result.stopped:
        exit_interrupted()
    if not result.learned:
        raise typer.Exit(1)
