"""Commands about environments: `agl env list`, `agl env check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from typer import Argument, Option

from agentlightning.cli.command import Command
from agentlightning.cli.options import Json

ABOUT = """Environments that bring tasks and rewards: which there are, and whether one works.

agl env list

agl env check harbor:./tasks
"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentListOptions(Command):
    """List the schemes of environments, and what was tested with each.

    agl env list --json                           for programs
    """

    command = "list"
    work = "agentlightning.cli.environments:list_environments"

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class EnvironmentCheckOptions(Command):
    """Try an environment out without a model: the solution of a task should earn 1, and doing nothing less.

    agl env check harbor:./tasks

    agl env check gym:FrozenLake-v1 --env-option is_slippery=false
    """

    command = "check"
    work = "agentlightning.cli.environments:check_environment"

    env: Annotated[str, Argument(help="SCHEME:NAME of an environment.")]
    env_option: Annotated[
        list[str],
        Option(help="NAME=VALUE: a setting of it, such as tasks=100; repeatable."),
    ] = field(default_factory=list)
    limit: Annotated[int, Option(min=1, help="Number of tasks to try.")] = 10
    as_json: Json = False
