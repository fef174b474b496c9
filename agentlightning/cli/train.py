"""`agl train`: GRPO on any agent, with settings from the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from agentlightning.algorithm import GRPO
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import RolloutConfig

console = Console(highlight=False, soft_wrap=True)


def train_agent(
    agent: LitAgent[Any],
    tasks: list[Any],
    val_tasks: list[Any] | None,
    *,
    model: str,
    settings: Sequence[str],
    timeout: float | None,
    concurrency: int,
    n_runners: int,
    strategy: str,
    run_dir: Path | None,
    resume: Path | None,
) -> None:
    """Train, then say what became better and where it is."""
    given = {"rollout_config": RolloutConfig(timeout_seconds=timeout), **parse_settings(settings)}
    algorithm = GRPO(model=model, **given)
    trainer = Trainer(
        algorithm=algorithm,
        concurrency=concurrency,
        n_runners=n_runners,
        strategy=None if strategy == "inline" else strategy,
        run_dir=run_dir,
        resume=resume,
    )
    result = trainer.fit(agent, tasks, val_tasks)
    if result.stopped:
        if result.checkpoint is not None:
            console.print(f"Stopped. Go on with the same command and  --resume {result.run_dir}")
        exit_interrupted()
    if not result.learned:
        raise typer.Exit(1)


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`name=value` as keyword arguments of GRPO; values are JSON, or text that is none.

    Raises ConfigError for a name that is no setting, with the names there are.
    """
    known = sorted(field.name for field in fields(GRPO) if field.name not in ("model", "rollout_config"))
    given: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ConfigError(f"--set {text}: give NAME=VALUE with one of {', '.join(known)}.")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return given
