"""`agl run`: an agent on tasks, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from shlex import quote
from statistics import mean
from typing import Any

from agentlightning.algorithm import Baseline
from agentlightning.algorithm.episode import Episode
from agentlightning.cli.agents import find_work
from agentlightning.cli.commands.start import RunOptions
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.console import Console
from agentlightning.doctor.in_rollouts import outcomes
from agentlightning.errors import ConfigError
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.installation import command_name
from agentlightning.keys import not_empty
from agentlightning.metrics import SilentConsole
from agentlightning.trainer import Trainer
from agentlightning.types import RolloutConfig, RolloutMode

console = Console(highlight=False, soft_wrap=True)


def run_agent(options: RunOptions) -> bool:
    """Run it, and print what came of it. Returns whether no rollout came to a reward."""
    agent, tasks, _ = find_work(options.agent, options.tasks, options.environment, options.program)
    if options.model and options.endpoint:
        raise ConfigError("Give --model or --endpoint, not both.")
    providers: dict[str, Provider] = {}
    if options.endpoint:  # asked through the gateway, so that its calls are recorded
        key = not_empty(options.api_key, "--api-key")
        providers["llm"] = Provider(base_url=options.endpoint, api_key=key, model=options.endpoint_model)
    algorithm = Baseline(
        model=options.model,
        repeats=options.repeats,
        mode=RolloutMode.TEST,
        max_concurrency=options.concurrency,
        rollout_config=RolloutConfig(timeout_seconds=options.timeout),
    )
    quiet: dict[str, Any] = {"console": SilentConsole()} if options.as_json else {}
    trainer = Trainer(
        algorithm=algorithm, models=providers, concurrency=options.concurrency, run_dir=options.run_dir, **quiet
    )
    result = trainer.fit(agent, tasks)
    if result.stopped:
        console.print("Stopped.")
        exit_interrupted()
    if options.as_json:
        console.print_json(json.dumps(numbers(algorithm.episodes) | {"run_dir": str(result.run_dir)}))
    else:
        console.print(f"Read what was said:  {command_name()} show {quote(str(result.run_dir))}")
    return not any(e.good for e in algorithm.episodes)


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
