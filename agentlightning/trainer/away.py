"""Runners that the trainer starts outside its own process: processes of this machine, or actors on a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentlightning.backend.ray.cluster import require_ray
from agentlightning.litagent import LitAgent
from agentlightning.runner.actors import RunnerActors, Work
from agentlightning.runner.processes import RunnerProcesses
from agentlightning.runner.sending import sent
from agentlightning.trainer.on_ray import ray_options

if TYPE_CHECKING:
    from agentlightning.trainer.trainer import Trainer

Away = RunnerProcesses | RunnerActors


def away_runners(trainer: Trainer, agent: LitAgent[Any]) -> Away | None:
    """Those that the strategy asks for, not yet at work; None where it asks for others. Raises ConfigError for an agent
    that cannot be sent."""
    if trainer.strategy.runners == "ray":
        require_ray()
        work = Work(sent(agent), trainer.hooks, trainer.tracer, trainer.concurrency, trainer.max_rollouts)
        return RunnerActors(trainer.n_runners, work, ray_options(trainer.algorithm))
    if trainer.strategy.runners != "processes":
        return None
    return RunnerProcesses.fork(
        trainer.n_runners,
        agent,
        trainer.hooks,
        trainer.tracer,
        concurrency=trainer.concurrency,
        max_rollouts=trainer.max_rollouts,
    )
