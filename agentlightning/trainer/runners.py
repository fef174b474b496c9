"""Runners outside the trainer's own process: those that it starts (processes of this machine, actors on a Ray cluster),
and the trainer itself in the role of a runner (AGL_CURRENT_ROLE=runner), with the algorithm in another process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Protocol

from agentlightning.algorithm.base import Algorithm
from agentlightning.backend.ray.cluster import require_ray
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Console
from agentlightning.metrics.console import default_console
from agentlightning.runner.actors import RunnerActors, RunnerWork
from agentlightning.runner.processes import RunnerProcesses
from agentlightning.runner.remote import serve_rollouts
from agentlightning.runner.sending import sent
from agentlightning.tracer import Tracer
from agentlightning.trainer.on_ray import ray_options
from agentlightning.trainer.result import RunResult
from agentlightning.trainer.strategy import Strategy
from agentlightning.trainer.sync import stop_on_interrupt
from agentlightning.types import Hook

GIVE_UP_SECONDS = 120.0
"""A trainer in the role of a runner ends when the algorithm's store has been out of reach for so long."""

StartedRunners = RunnerProcesses | RunnerActors


class OwnerOfRunners(Protocol):
    """A trainer, as runners see it."""

    algorithm: Algorithm
    strategy: Strategy
    hooks: list[Hook]
    tracer: Tracer
    n_runners: int
    concurrency: int
    max_rollouts: int | None
    console: Console | None
    run_dir: Path


def started_runners(trainer: OwnerOfRunners, agent: LitAgent[Any]) -> StartedRunners | None:
    """The runners that the strategy asks for, not yet at work; None where it asks for others. Raises ConfigError for an
    agent that cannot be sent.
    """
    if trainer.strategy.runners == "ray":
        require_ray()
        work = RunnerWork(sent(agent), trainer.hooks, trainer.tracer, trainer.concurrency, trainer.max_rollouts)
        return RunnerActors(trainer.n_runners, work, ray_options(trainer.algorithm), trainer.run_dir.name)
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


async def be_a_runner(trainer: OwnerOfRunners, agent: LitAgent[Any]) -> RunResult:
    """Run what the algorithm in another process asks for, until its store is gone."""
    stop = asyncio.Event()
    console = trainer.console or default_console()
    with stop_on_interrupt(stop, console.note):
        console.status(f"running rollouts of {trainer.strategy.address.url}")
        await asyncio.gather(
            *(
                serve_rollouts(
                    agent,
                    trainer.strategy.address,
                    stop=stop,
                    hooks=trainer.hooks,
                    tracer=trainer.tracer,
                    concurrency=trainer.concurrency,
                    max_rollouts=trainer.max_rollouts,
                    give_up_seconds=GIVE_UP_SECONDS,
                )
                for _ in range(trainer.n_runners)
            )
        )
    console.close()
    return RunResult(trainer.run_dir, None, stop.is_set())
