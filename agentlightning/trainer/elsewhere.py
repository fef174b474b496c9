"""A trainer in the role of a runner: AGL_CURRENT_ROLE=runner, with the algorithm in another process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from agentlightning.litagent import LitAgent
from agentlightning.metrics.notebook import default_console
from agentlightning.runner.remote import serve_rollouts
from agentlightning.trainer.result import RunResult
from agentlightning.trainer.sync import stop_on_interrupt

if TYPE_CHECKING:
    from agentlightning.trainer.trainer import Trainer

GIVE_UP_SECONDS = 120.0
"""It ends when the algorithm's store has been out of reach for so long."""


async def be_a_runner(trainer: Trainer, agent: LitAgent[Any]) -> RunResult:
    """Run what the algorithm elsewhere asks for, until its store is gone."""
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
