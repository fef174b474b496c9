"""Codex, as it is published, whose main agent is another model's, and whose sub-agent is the one that is trained."""

from __future__ import annotations

import sys
from typing import Any

import agentlightning as agl
from agentlightning.trainer.example import example_dir, load_example

terminal: Any = load_example("terminal", "program")
PLANNER = "planner"
"""The main agent's model, as the gateway knows it: `Trainer(models={"planner": …})`."""


def make_agent() -> agl.Program:
    """The agent. Raises ConfigError where Codex or bubblewrap is missing."""
    start = example_dir("terminal", "program") / "inside" / "start.py"
    command = [sys.executable, "-I", "-S", str(start), terminal.codex(), PLANNER]
    agent: agl.Program = terminal.Repairer(
        command, grader=terminal.grade, isolation="bubblewrap", limits=agl.Limits(file_bytes=64 * 1024**2)
    )
    return agent
