"""Options that several commands have."""

from __future__ import annotations

import json
from ast import literal_eval
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from typer import Argument, Option

from agentlightning.cli.command import Options
from agentlightning.cli.key_options import key_option

AGENT_HELP = (
    "file.py:name of a function, a command such as 'node agent.js {task.question}', or a named agent such as codex "
    "(agl agents)."
)
Agent = Annotated[str | None, Option(help=AGENT_HELP)]
Tasks = Annotated[
    Path | None,
    Option(help=("File of tasks: .jsonl (a JSON value per line), .json (an array), .csv (with a header) or .parquet.")),
]
Timeout = Annotated[float | None, Option(min=0.001, help="Seconds per attempt; an hour if not given.")]
Json = Annotated[bool, Option("--json", help="Print JSON, for programs.")]
Trust = Annotated[
    bool, Option("--trust", help="Import the code named by a run's folder or --config: its agent, its loss.")
]
Concurrency = Annotated[int, Option(min=1, help="Concurrent rollouts.")]
KeepAnswers = Annotated[
    float,
    Option(
        min=0,
        help=(
            "Minutes (60) for which a request can continue an earlier answer by its id (previous_response_id, "
            "item_reference), and for which an unused session stays one attempt; a session is named in a header, "
            "or is a chain of such requests; 0 turns both off."
        ),
    ),
]
AllowHost = Annotated[
    list[str],
    Option(help="Another host name under which clients reach the server, as behind a proxy; repeatable."),
]
RunDir = Annotated[Path | None, Option(help="Folder for the run's files; a new folder in runs/ if not given.")]
Run = Annotated[Path, Argument(help="A run's folder, or the file of a store; the run may be going on.")]
RunId = Annotated[str | None, Option("--run-id", help="Which run, if the store holds several; the last if not given.")]
Strict = Annotated[bool, Option(help="Refuse requests with fields or tools that have no effect here, by name.")]

_OF_PYTHON = {"True": True, "False": False, "None": None}


def value_in(text: str) -> Any:
    """The value of NAME=VALUE: JSON, or a constant, a list or a dict as Python writes it; else text."""
    try:
        return _OF_PYTHON[text] if text in _OF_PYTHON else json.loads(text)
    except ValueError:
        pass
    try:
        return literal_eval(text) if text[:1] in ("{", "[", "(") else text
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True, kw_only=True)
class ProgramOptions(Options):
    """How a command is run as an agent; see `Program`. They mean nothing to a Python function, which refuses them."""

    task_as: Annotated[
        Literal["stdin", "file", "env"] | None,
        Option(help="Where a program finds its task: stdin (JSON), file (path in AGL_TASK_FILE) or env (AGL_TASK)."),
    ] = None
    reward: Annotated[
        Literal["last_line", "file", "http"] | None,
        Option(
            help=(
                "Where a program leaves its reward: last_line of its output, file (path in AGL_REWARD_FILE) or http "
                "(POST to AGL_REWARD_URL)."
            )
        ),
    ] = None
    grader: Annotated[
        str | None, Option(help="A command that reads the finished run as JSON and prints the reward.")
    ] = None
    files: Annotated[Path | None, Option(help="A folder to copy into each working directory.")] = None
    workspaces: Annotated[Path | None, Option(help="Keep the working directories in this folder.")] = None
    isolation: Annotated[
        Literal["bubblewrap", "kubernetes"] | None,
        Option(help="Run programs in a sandbox of this machine, or each attempt as a Job of a Kubernetes cluster."),
    ] = None
    isolation_option: Annotated[
        list[str],
        Option(
            help="NAME=VALUE: a setting of --isolation kubernetes, such as image=me/agent:1, which it needs; "
            "repeatable."
        ),
    ] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class EnvironmentOptions(Options):
    """An environment, which brings tasks and rewards; see `Environment`."""

    env: Annotated[
        str | None,
        Option(
            help="SCHEME:NAME of an environment that provides tasks and rewards, such as gym:Taxi-v4 or "
            "harbor:./tasks (agl env list)."
        ),
    ] = None
    env_option: Annotated[
        list[str],
        Option(help="NAME=VALUE: a setting of --env, such as tasks=100; repeatable."),
    ] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BackendOptions(Options):
    """Where the model is sampled."""

    backend: Annotated[
        str | None, Option(help="Where the model is sampled: embedded, vllm or ray; embedded if not given.")
    ] = None
    backend_option: Annotated[
        list[str],
        Option(help="NAME=VALUE: a setting of the backend's own, such as replicas=2; repeatable."),
    ] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class UpstreamOptions(Options):
    """Other providers that agents may ask through the gateway."""

    goes_with: ClassVar = {"upstream_key": ("upstream",)}

    upstream: Annotated[
        list[str],
        Option(
            help=(
                "NAME=URL of another provider, such as a judge, which agents can call by its name through the "
                "gateway; recorded, never trained; repeatable."
            )
        ),
    ] = field(default_factory=list)
    upstream_key: Annotated[str | None, key_option("AGL_UPSTREAM_KEY", "The key that these providers are sent.")] = None
    upstream_price: Annotated[
        list[str],
        Option(help="NAME=INPUT,OUTPUT[,CACHED_INPUT]: price of this provider per million tokens."),
    ] = field(default_factory=list)
    upstream_limit: Annotated[
        list[str],
        Option(
            help="NAME.LIMIT=NUMBER: a limit on its use; LIMIT is calls, tokens or cost (of one rollout), "
            "run_calls, run_tokens or run_cost."
        ),
    ] = field(default_factory=list)
