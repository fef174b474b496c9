"""`agl run`: an agent on tasks, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import typer

from agentlightning.algorithm import Baseline
from agentlightning.algorithm.episode import Episode
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.console import Console
from agentlightning.doctor.in_rollouts import outcomes
from agentlightning.errors import ConfigError
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.installation import command_name
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.metrics import SilentConsole
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
    as_json: bool = False,
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
    told: dict[str, Any] = {"console": SilentConsole()} if as_json else {}
    trainer = Trainer(algorithm=algorithm, models=providers, concurrency=concurrency, run_dir=run_dir, **told)
    result = trainer.fit(agent, tasks)
    if result.stopped:
        console.print("Stopped.")
        exit_interrupted()
    if as_json:
        console.print_json(json.dumps(numbers(algorithm.episodes) | {"run_dir": str(result.run_dir)}))
    else:
        console.print(f"Read what was said:  {command_name()} show {result.run_dir}")
    if not any(e.good for e in algorithm.episodes):
        raise typer.Exit(1)


def numbers(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What came of the rollouts: how many, how they ended, what they earned on average, and each one by itself."""
    rated = [e.reward for e in episodes if e.good and e.reward is not None]
    return {
        "rollouts": len(episodes),
        "outcomes": outcomes(episodes),
        "reward": mean(rated) if rated else None,
        "calls": sum(len(e.calls) for e in episodes),
        "each": [
            {
                "rollout_id": e.rollout.rollout_id,
                "task": e.rollout.input,
                "outcome": e.outcome.value,
                "reward": e.reward,
                "error": e.attempt.error if e.attempt else None,
            }
            for e in episodes
        ],
    }
