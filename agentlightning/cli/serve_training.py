"""`agl serve --training`: the fine-tuning APIs of OpenAI and Tinker on models of one's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentlightning.cli.agents import find_agent
from agentlightning.cli.commands.serve import ServeOptions
from agentlightning.cli.interrupt import interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError, missing_extra
from agentlightning.files import make_folder, open_private
from agentlightning.keys import new_key
from agentlightning.litagent import Program
from agentlightning.net.guard import is_local_name
from agentlightning.reading import whole_number
from agentlightning.trainer.sync import run_sync

console = Console(highlight=False, soft_wrap=True)

KEY_FILE = "admin.key"
"""In the server's folder: the admin key that was made for it, the same at each start."""


def run_training_server(options: ServeOptions) -> None:
    """Serve until Ctrl-C."""
    folder = options.training
    if folder is None:
        raise ConfigError(
            "--base-models, --agent, --quota and --no-key are for jobs: give --training FOLDER with them."
        )
    _refuse_without_effect(options)
    try:
        from agentlightning.finetuning.app import ServerSettings, TrainingServer
        from agentlightning.finetuning.jobs import Quotas
        from agentlightning.finetuning.models import read_bases
        from agentlightning.finetuning.recipe import check
    except ModuleNotFoundError as error:
        raise missing_extra("finetuning", error.name or "python-multipart") from error

    bases = read_bases(options.base_models, [options.model] if options.model else [])
    for base in bases.values():
        check(base)
    key = admin_key_of(folder, options.api_key, options.host, open_to_all=options.no_key)
    settings = ServerSettings(
        host=options.host,
        port=options.port,
        admin_key=key,
        allow_hosts=options.allow_host,
        max_context=options.max_context,
        agents=dict(_agent(one) for one in options.agent),
        quotas=Quotas(**_quotas(options.quota)),
    )
    shown = None if key == options.api_key else key
    run_sync(_serve(TrainingServer(folder, bases, settings), list(bases), shown, folder / KEY_FILE))


def _refuse_without_effect(options: ServeOptions) -> None:
    """Raises ConfigError for options that a server of trainings does not have."""
    without = {
        "--name": options.name is not None,
        "--strict": options.strict,
        "--backend": options.computed.backend is not None,
        "--backend-option": bool(options.computed.backend_option),
        "--keep-answers": options.keep_answers != ServeOptions.keep_answers,
    }
    if given := [option for option, was_given in without.items() if was_given]:
        raise ConfigError(f"{given[0]} has no effect with --training: a base model's settings are in --base-models.")


def admin_key_of(folder: Path, given: str | None, host: str, *, open_to_all: bool = False) -> str | None:
    """The key that is given; else, on loopback, the one that was made for the folder, which is made now if there is
    none. None: whoever reaches the server may do everything. Raises ConfigError where both are wanted."""
    if open_to_all and given is not None:
        raise ConfigError("--no-key lets everybody on this machine in, and --api-key only those who have a key.")
    if given is not None or open_to_all or not is_local_name(host):
        return given
    file = folder / KEY_FILE
    if not file.exists():
        make_folder(folder)
        work = folder / f".{KEY_FILE}.{os.getpid()}"
        with open_private(work, "w") as opened:
            opened.write(new_key())
        work.replace(file)
    return file.read_text().strip()


def _agent(given: str) -> tuple[str, str]:
    """The name and the place of an agent, which is looked for once to see that it is there."""
    name, _, reference = given.partition("=")
    if not name or not reference:
        raise ConfigError(f"--agent is {given!r}; give NAME=path/to/file.py:agent, or NAME=COMMAND.")
    if isinstance(find_agent(reference), Program):
        return name, reference
    file, _, attribute = reference.rpartition(":")
    return name, f"{Path(file).expanduser().resolve()}:{attribute}"


def _quotas(given: Sequence[str]) -> Mapping[str, int]:
    """NAME=VALUE of what each key may have."""
    from agentlightning.finetuning.jobs import Quotas

    known, found = {one.name for one in fields(Quotas)}, dict[str, int]()
    for text in given:
        name, _, value = text.partition("=")
        if name not in known or not (number := whole_number(value)):
            raise ConfigError(f"--quota is {text!r}; give NAME=NUMBER, where NAME is {' or '.join(sorted(known))}.")
        found[name] = number
    return found


async def _serve(server: Any, bases: Sequence[str], key: str | None, kept: Path) -> None:
    await server.start()
    try:
        console.print(
            f"OpenAI's API, with fine-tuning of {', '.join(bases)}, at [bold]{server.endpoint}[/bold]  (Ctrl-C stops)\n"
            f"Clients take it as their base URL: OPENAI_BASE_URL={server.endpoint}\n"
            f"Clients of tinker: TINKER_BASE_URL={server.endpoint.removesuffix('/v1')}, and in TINKER_API_KEY the key "
            "with tml- in front"
        )
        if key is not None:
            stays = f"kept in {kept} for the next start; --api-key gives another, --no-key none"
            console.show_key("Clients send the key", key, stays)
        stopping = asyncio.create_task(interrupted())
        watching = asyncio.create_task(server.watch())
        await asyncio.wait((stopping, watching), return_when=asyncio.FIRST_COMPLETED)
        if watching.done():
            watching.result()
        console.print("Stopping: a job that runs writes a checkpoint and goes on at the next start.")
    finally:
        await server.stop()
