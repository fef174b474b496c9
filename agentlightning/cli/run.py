"""`agl run`: an agent on tasks, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from agentlightning.algorithm import Baseline
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.errors import ConfigError
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.installation import command_name
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import RolloutConfig, RolloutMode

console = Console(highlight=False, soft_wrap=True)


def run_agent(
    agent: LitAgent[Any],
    tasks: list[Any],
    *,
    model: str | None,
    endpoint: str | None,
    endpoint_model: str,
    api_key: str | None,
    repeats: int,
    timeout: float | None,
    concurrency: int,
    run_dir: Path | None,
) -> None:
    """Run it, which says what came of it. Exits with 1 when no rollout came to a reward."""
    if model and endpoint:
        raise ConfigError("Give --model or --endpoint, not both.")
    providers: dict[str, Provider] = {}
    if endpoint:  # asked through the gateway, so that its calls are recorded
        key = not_empty(api_key, "--api-key")
        providers["llm"] = Provider(base_url=endpoint, api_key=key, model=endpoint_model)
    algorithm = Baseline(
        model=model,
        repeats=repeats,
        mode=RolloutMode.TEST,
        max_concurrency=concurrency,
        rollout_config=RolloutConfig(timeout_seconds=timeout),
    )
    trainer = Trainer(algorithm=algorithm, models=providers, concurrency=concurrency, run_dir=run_dir)
    result = trainer.fit(agent, tasks)
    if result.stopped:
        console.print("Stopped.")
        exit_interrupted()
    console.print(f"Read what was said:  {command_name()} show {result.run_dir}")
    if not any(e.good for e in algorithm.episodes):
        raise typer.Exit(1)
