"""`agl env`: the schemes of environments, and one that is tried out without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from agentlightning.cli.agents import environment_of
from agentlightning.cli.commands.environments import EnvironmentCheckOptions, EnvironmentListOptions
from agentlightning.cli.options import EnvironmentOptions
from agentlightning.console import terminal
from agentlightning.environments import SCHEMES, Environment, Probe
from agentlightning.environments.base import environment_class
from agentlightning.trainer.sync import run_sync
from agentlightning.types.finding import counted


def list_environments(options: EnvironmentListOptions) -> None:
    """Print each scheme with what it is and what was tested."""
    kinds = {scheme: environment_class(scheme) for scheme in SCHEMES}
    if options.as_json:
        shown = {scheme: {"summary": kind.summary, "tested": kind.tested} for scheme, kind in kinds.items()}
        terminal().print_json(json.dumps(shown))
        return
    table = Table("scheme", "what it is", "tested", box=None)
    for scheme, kind in kinds.items():
        table.add_row(f"{scheme}:", kind.summary, kind.tested)
    terminal().print(table)


def check_environment(options: EnvironmentCheckOptions) -> bool:
    """Print what came of each trial; whether one was not as expected."""
    named = EnvironmentOptions(env=options.env, env_option=options.env_option)
    environment = environment_of(named, None)
    assert environment is not None
    tasks = list(environment.tasks())
    probes = run_sync(_probes(environment, tasks[: options.limit]))
    bad = [probe for probe in probes if not probe.good]
    if options.as_json:
        terminal().print_json(json.dumps([asdict(probe) for probe in probes]))
        return bool(bad)
    table = Table("task", "by", "reward", "expected", "seconds", "", box=None)
    for probe in probes:
        reward = ("–" if probe.good else "failed") if probe.reward is None else f"{probe.reward:g}"
        mark = "[green]good[/green]" if probe.good else "[red]not as expected[/red]"
        table.add_row(Text(probe.task), probe.by, reward, probe.expected, f"{probe.seconds:.1f}", mark)
    terminal().print(table)
    for (by, why), tasks_of in _reasons(bad).items():
        more = f" (and {len(tasks_of) - 1} more)" if len(tasks_of) > 1 else ""
        terminal().print(Text(f"{tasks_of[0]}{more}, {by}: {why}"))
    looked, good = min(len(tasks), options.limit), len(probes) - len(bad)
    terminal().print(
        f"{looked} of {counted(len(tasks), 'task was', 'tasks were')} tried: {good} of "
        f"{counted(len(probes), 'trial is', 'trials are')} as expected."
    )
    return bool(bad)


def _reasons(bad: Sequence[Probe]) -> dict[tuple[str, str], list[str]]:
    """The tasks of each reason, which is printed once."""
    found: dict[tuple[str, str], list[str]] = {}
    for probe in bad:
        if probe.why:
            found.setdefault((probe.by, probe.why), []).append(probe.task)
    return found


async def _probes(environment: Environment, tasks: Sequence[Any]) -> list[Probe]:
    return [probe async for probe in environment.probes(tasks)]
