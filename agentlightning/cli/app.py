"""The command tree. Each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.command import Command, add
from agentlightning.cli.commands import environments, look, operate, serve, start, train
from agentlightning.cli.store_commands import store_app
from agentlightning.cli.usage import Commands
from agentlightning.errors import ConfigError

COMMANDS: Mapping[str, tuple[type[Command], ...]] = {
    "Start here": (
        start.DemoOptions,
        start.ModelsOptions,
        start.PlanOptions,
        start.DoctorOptions,
        start.RunOptions,
    ),
    "Train": (train.TrainOptions, train.AgentsOptions, train.OptimizeOptions, train.EvalOptions, train.ImportOptions),
    "Look": (
        look.RunsOptions,
        look.ShowOptions,
        look.ForkOptions,
        look.WatchOptions,
        look.WhyOptions,
        look.CompareOptions,
        look.WhatIfOptions,
        look.JudgeOptions,
        look.ReportOptions,
        look.DashboardOptions,
    ),
    "Use the model": (serve.ServeOptions, serve.ExportOptions),
    "Operate": (operate.RunnerOptions, operate.GatewayOptions),
}
"""By the panel of the help that they stand in. `agl store`, which has commands of its own, is the last of them."""
_NOT_HERE: Mapping[str, str] = {
    "prometheus": "There is nothing to start: `agl store` serves its counters at /metrics of its own address.",
    "vllm": "vLLM's own server needs no change: start it with `vllm serve MODEL`, and put the gateway in front of it "
    "with `agl gateway --upstream NAME=http://127.0.0.1:8000/v1`.",
}
"""Commands of 0.3, and what to do instead."""

app = typer.Typer(
    name="agl",
    cls=Commands,
    help="Agent Lightning: train any LLM agent with (almost) no change to its code.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(show: bool) -> None:
    if show:
        from agentlightning import __version__

        typer.echo(f"Agent Lightning {__version__}, an independent implementation of agentlightning's names and ideas.")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Agent Lightning: train any LLM agent with (almost) no change to its code."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("The folder that you are in was deleted. Go to another one with cd.") from None


def _refuse(context: typer.Context) -> None:
    raise ConfigError(_NOT_HERE[str(context.info_name)])


for _panel, _commands in COMMANDS.items():
    for _command in _commands:
        add(app, _command, _panel)
for _name in _NOT_HERE:
    app.command(_name, hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        _refuse
    )
_env_app = typer.Typer(name="env", no_args_is_help=True, help=environments.ABOUT, rich_markup_mode="rich")
for _command in (environments.EnvironmentListOptions, environments.EnvironmentCheckOptions):
    add(_env_app, _command, None)
app.add_typer(_env_app, rich_help_panel="Start here")
app.add_typer(store_app, rich_help_panel=[*COMMANDS][-1])
