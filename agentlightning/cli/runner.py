"""`agl runner`: rollouts for a trainer or a store elsewhere."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from agentlightning.cli.agents import environment_of, find_agent
from agentlightning.cli.commands.operate import RunnerOptions
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.cli.store import read_secret
from agentlightning.console import Console
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.store import LightningStoreClient
from agentlightning.store.http.client import RETRY_SECONDS
from agentlightning.trainer.sync import run_sync, stop_on_interrupt
from agentlightning.types import FINISHED_ROLLOUT, RolloutStatus

console = Console(highlight=False, soft_wrap=True)


def run_runner(options: RunnerOptions) -> None:
    """Claim and run rollouts until Ctrl-C. Raises StoreError when the server is not there to begin with."""
    environment = environment_of(options.environment, options.agent, options.program)
    if environment is None and options.agent is None:
        raise ConfigError(
            "Say which agent runs here: --agent AGENT, or the environment that has it: --env SCHEME:NAME."
        )
    agent = environment.agent if environment else find_agent(str(options.agent), options.program)
    secret = read_secret(options.secret_file, create=False) if options.secret_file else None
    if run_sync(_serve(agent, Address(options.server, options.key, secret, options.run), options)):
        exit_interrupted()


async def _serve(agent: LitAgent[Any], address: Address, options: RunnerOptions) -> bool:
    """Whether Ctrl-C ended it."""
    tried = min(RETRY_SECONDS, options.give_up_after or RETRY_SECONDS)
    client = LightningStoreClient(address.url, key=address.key, retry_seconds=tried)
    console.print(f"Looking for the store at {address.url} …")
    try:
        counts = (await client.statistics())["rollouts"]  # is it there, and may we?
    finally:
        await client.close()
    stop = asyncio.Event()
    with stop_on_interrupt(
        stop, lambda _: console.print("Finishing what runs (Ctrl-C again to stop at once)")
    ) as received:
        console.print(f"Running rollouts of [bold]{address.url}[/bold], {options.concurrency} at once (Ctrl-C stops)")
        if not any(counts.get(status.value) for status in RolloutStatus if status not in FINISHED_ROLLOUT):
            console.print(
                f"No rollout waits there now. Who trains puts them there (agl train --server {address.url}); a "
                "dashboard of a run that has ended shows its store, and puts none there.",
                markup=False,
            )
        if agent.group_reward is not None:
            console.print(
                "The trainer calls the agent's group_reward: give it the agent, too (agl train --remote --agent …)"
            )
        await serve_rollouts(
            agent,
            address,
            stop=stop,
            concurrency=options.concurrency,
            max_rollouts=options.max_rollouts,
            give_up_seconds=options.give_up_after,
        )
    console.print("Stopped.")
    return signal.SIGINT in received
