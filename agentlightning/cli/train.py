"""`agl train`: the GRPO family on any agent, with settings from a file and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from agentlightning.cli.configuration import make_algorithm
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import RolloutConfig

console = Console(highlight=False, soft_wrap=True)


def train_agent(
    agent: LitAgent[Any],
    tasks: list[Any],
    val_tasks: list[Any] | None,
    *,
    algorithm: str | None,
    model: str | None,
    config: Path | None,
    settings: Sequence[str],
    timeout: float | None,
    concurrency: int,
    n_runners: int,
    strategy: str,
    run_dir: Path | None,
    resume: Path | None,
) -> None:
    """Train, then say what became better and where it is."""
    others = {"rollout_config": RolloutConfig(timeout_seconds=timeout)}
    trainer = Trainer(
        algorithm=make_algorithm(algorithm, model, config, settings, **others),
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
