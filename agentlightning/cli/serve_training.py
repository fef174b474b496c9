"""`agl serve --training`: OpenAI's fine-tuning API on models of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.cli.interrupt import interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError, missing_extra
from agentlightning.trainer.example import load_agent
from agentlightning.trainer.sync import run_sync

console = Console(highlight=False, soft_wrap=True)


def run_training_server(
    model: str | None,
    folder: Path | None,
    base_models: Path | None,
    *,
    host: str,
    port: int,
    admin_key: str | None,
    max_context: int,
    allow_hosts: Sequence[str],
    agents: Sequence[str],
    others: Mapping[str, Any],
) -> None:
    """Serve until Ctrl-C. `others`: options that have no meaning here, each None if it was not given."""
    if folder is None:
        raise ConfigError("--base-models and --agent are for jobs: give --training FOLDER with them.")
    if given := [option for option, value in others.items() if value is not None]:
        raise ConfigError(f"{given[0]} has no effect with --training: a base model's settings are in --base-models.")
    try:
        from agentlightning.finetuning.app import ServerSettings, TrainingServer
        from agentlightning.finetuning.models import read_bases
        from agentlightning.finetuning.recipe import check
    except ModuleNotFoundError as error:
        raise missing_extra("finetuning", error.name or "python-multipart") from error

    bases = read_bases(base_models, [model] if model else [])
    for base in bases.values():
        check(base)
    settings = ServerSettings(
        host=host,
        port=port,
        admin_key=admin_key,
        allow_hosts=allow_hosts,
        max_context=max_context,
        agents=dict(_agent(one) for one in agents),
    )
    run_sync(_serve(TrainingServer(folder, bases, settings), list(bases)))


def _agent(given: str) -> tuple[str, str]:
    """The name and the place of an agent, which is loaded once to see that it is there."""
    name, _, reference = given.partition("=")
    if not name or not reference:
        raise ConfigError(f"--agent is {given!r}; give NAME=path/to/file.py:agent.")
    load_agent(reference)
    file, _, attribute = reference.rpartition(":")
    return name, f"{Path(file).expanduser().resolve()}:{attribute}"


async def _serve(server: Any, bases: Sequence[str]) -> None:
    await server.start()
    try:
        console.print(
            f"OpenAI's API, with fine-tuning of {', '.join(bases)}, at [bold]{server.endpoint}[/bold]  (Ctrl-C stops)\n"
            f"Clients take it as their base URL: OPENAI_BASE_URL={server.endpoint}"
        )
        stopping = asyncio.create_task(interrupted())
        watching = asyncio.create_task(server.watch())
        await asyncio.wait((stopping, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        console.print("Stopping: a job that runs writes a checkpoint and goes on at the next start.")
    finally:
        await server.stop()
