"""Commands that run beside trainings, on this machine or on others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Option

from agentlightning.cli.command import Command
from agentlightning.cli.key_options import key_option
from agentlightning.cli.options import (
    Agent,
    AllowHost,
    Concurrency,
    EnvironmentOptions,
    KeepAnswers,
    ProgramOptions,
    Strict,
    UpstreamOptions,
)


@dataclass(frozen=True, kw_only=True)
class RunnerOptions(Command):
    """Run rollouts for a trainer on another machine; connections go out only. Join and leave at any time.

    agl runner --server http://trainer:4747 --key @key.txt --agent my_agent.py:agent
    """

    command = "runner"
    work = "agentlightning.cli.runner:run_runner"

    server: Annotated[str, Option(help="URL of the store's server, such as http://10.0.0.1:4747.")]
    agent: Agent = None
    key: Annotated[str | None, key_option("AGL_STORE_KEY", "Admin key of that store.")] = None
    secret_file: Annotated[
        Path | None, Option(help="File with the secret of attempt keys, if it is not derived from the key.")
    ] = None
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    program: ProgramOptions = field(default_factory=ProgramOptions)
    concurrency: Concurrency = 16
    max_rollouts: Annotated[int | None, Option(min=1, help="Stop after this many rollouts.")] = None
    give_up_after: Annotated[
        float | None, Option(min=0.0, help="Stop when the server was out of reach for this many seconds.")
    ] = None
    run: Annotated[str | None, Option(help="The id of the run to work for, where a store holds several.")] = None


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(Command):
    """Run the gateway alone, in front of a model or of other providers: every call is recorded in a store.

    agl gateway --model calc --path calls.db

    agl gateway --upstream gpt=https://api.openai.com/v1 --upstream-key @key.txt --path calls.db
    """

    command = "gateway"
    work = "agentlightning.cli.gateway:run_gateway"
    goes_with: ClassVar = {"name": ("model",), "key": ("server",)}

    model: Annotated[str | None, Option(help="Serve this model: a checkpoint, a directory, a Hugging Face id.")] = None
    name: Annotated[
        str | None, Option(help="What clients call --model; the run's or the model's name if not given.")
    ] = None
    providers: UpstreamOptions = field(default_factory=UpstreamOptions)
    path: Annotated[Path, Option(help="SQLite file to record in; gateway.db if not given.")] = Path("gateway.db")
    server: Annotated[str | None, Option(help="Record in the store served at this URL instead.")] = None
    key: Annotated[str | None, key_option("AGL_STORE_KEY", "Admin key of that store.")] = None
    secret_file: Annotated[
        Path | None,
        Option(
            help=(
                "File with the secret of attempt keys, as for agl store: their holders may call too; derived "
                "from --key if not given, as runners do."
            )
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; other than loopback needs --api-key.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000
    api_key: Annotated[
        str | None, key_option("AGL_API_KEY", "Key that clients must send; one is made with --upstream-key.")
    ] = None
    no_key: Annotated[bool, Option("--no-key", help="Let everybody on this machine spend by --upstream-key.")] = False
    allow_host: AllowHost = field(default_factory=list)
    atif: Annotated[
        Path | None,
        Option(
            help="Write the trajectory of each session into this folder when it ends, in ATIF 1.8, with the exact "
            "tokens of --model and their log-probabilities."
        ),
    ] = None
    keep_answers: KeepAnswers = 60.0
    strict: Strict = False
