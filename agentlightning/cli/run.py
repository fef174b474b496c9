"""`agl run`: an agent on tasks, without training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from agentlightning.algorithm import Baseline
from agentlightning.algorithm.episode import Episode
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.trainer import Trainer
from agentlightning.types import LLM, NamedResources, Outcome, RolloutConfig, RolloutMode

console = Console(highlight=False, soft_wrap=True)
SHOWN_FAILURES = 3


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
    """Run it and print the table. Exits with 1 when no rollout came to a reward."""
    if model and endpoint:
        raise ConfigError("Give --model or --endpoint, not both.")
    resources: NamedResources = {}
    if endpoint:
        resources["llm"] = LLM(endpoint=endpoint, model=endpoint_model, api_key=api_key)
    algorithm = Baseline(
        model=model,
        repeats=repeats,
        mode=RolloutMode.TEST,
        max_concurrency=concurrency,
        rollout_config=RolloutConfig(timeout_seconds=timeout),
    )
    trainer = Trainer(algorithm=algorithm, initial_resources=resources, concurrency=concurrency, run_dir=run_dir)
    result = trainer.fit(agent, tasks)
    console.print(_table(algorithm.episodes))
    for episode in [e for e in algorithm.episodes if not _good(e)][:SHOWN_FAILURES]:
        error = (episode.attempt and episode.attempt.error) or ""
        console.print(f"[yellow]{episode.outcome.value}[/yellow] on {episode.rollout.input!r:.200}\n{error}\n")
    console.print(f"Everything is recorded in [bold]{result.run_dir}[/bold].")
    if not any(_good(e) for e in algorithm.episodes):
        raise typer.Exit(1)


def _good(episode: Episode) -> bool:
    return episode.outcome in (Outcome.OK, Outcome.TRUNCATED)


def _table(episodes: Sequence[Episode]) -> Table:
    outcomes = Counter(e.outcome.value for e in episodes)
    rewards = [e.reward for e in episodes if e.reward is not None]
    table = Table("rollouts", "mean reward", "model calls", "sampled tokens", *outcomes)
    table.add_row(
        str(len(episodes)),
        f"{sum(rewards) / len(rewards):.3f}" if rewards else "–",
        str(sum(len(e.calls) for e in episodes)),
        str(sum(len(c.response_ids) for e in episodes for c in e.calls)),
        *map(str, outcomes.values()),
    )
    return table
