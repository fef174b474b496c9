"""`agl agents`: the agents that have a name, and which of them are installed here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from rich.table import Table

from agentlightning.cli.commands.train import AgentsOptions
from agentlightning.console import terminal
from agentlightning.litagent.known_agents import KNOWN_AGENTS, KnownAgent

_SECONDS = 20.0
"""How long a program may take to say its version."""
_VERSION = re.compile(r"\d+(?:\.\d+)+\S*")


def list_agents(options: AgentsOptions) -> None:
    """Print each with its version here, the newest that was tested, and how its sub-agents are told apart."""
    agents = list(KNOWN_AGENTS.values())
    with ThreadPoolExecutor(len(agents)) as pool:
        versions = list(pool.map(_installed, agents))
    if options.as_json:
        terminal().print_json(json.dumps([_record(a, v) for a, v in zip(agents, versions, strict=True)]))
        return
    table = Table("agent", "here", "tested", "sub-agents", box=None)
    for agent, version in zip(agents, versions, strict=True):
        table.add_row(agent.name, version or f"[dim]{agent.install}[/dim]", agent.tested, agent.sub_agents)
    terminal().print(table)
    terminal().print("Any other:  --agent 'command {task.field}'")


def _record(agent: KnownAgent, version: str | None) -> dict[str, str | list[str] | None]:
    return {
        "name": agent.name,
        "installed": version,
        "tested": agent.tested,
        "install": agent.install,
        "command": list(agent.command),
        "sub_agents": agent.sub_agents,
    }


def _installed(agent: KnownAgent) -> str | None:
    """The version that is installed; `yes` where it does not say one."""
    program = shutil.which(agent.program)
    if program is None:
        return None
    try:
        printed = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "yes"
    return (_first_version(printed.stdout.splitlines()) if printed.returncode == 0 else None) or "yes"


def _first_version(lines: Iterable[str]) -> str | None:
    return next((found[0] for line in lines if (found := _VERSION.search(line))), None)
