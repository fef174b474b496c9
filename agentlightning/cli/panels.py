"""Which commands, and which of their options, stand together in the help. A test keeps both tables whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "Start here": ("demo", "models", "plan", "doctor", "run"),
    "Train": ("train", "agents", "optimize", "eval"),
    "Look": ("runs", "show", "watch", "why", "compare", "whatif", "judge", "report", "dashboard"),
    "Use the model": ("serve", "export"),
    "Operate": ("store", "runner", "gateway"),
}
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "The agent and its tasks": ("agent", "tasks", "val_tasks", "data", "remote", "repeats"),
    "What is learned": ("algorithm", "model", "steps", "seed", "config", "trust", "settings", "print_config"),
    "Prompts": ("prompt", "system_prompt", "prompt_place", "tool_description", "demonstrations", "answer"),
    "The agent's model": ("endpoint", "endpoint_model", "api_key"),
    "The critic": ("critic_url", "critic_model", "critic_key"),
    "Limits": ("budget_rollouts", "budget_critic_tokens", "budget_cost", "prices", "timeout", "concurrency"),
    "Agents that are programs": (
        *("task_as", "reward", "grader", "files", "workspaces", "isolation", "isolation_option"),
    ),
    "Other providers": ("upstream", "upstream_key", "upstream_price", "upstream_limit"),
    "Where it runs": (
        *("backend", "backend_option", "address", "n_runners", "strategy", "server", "key", "key_file", "secret_file"),
        *("max_rollouts", "give_up_after"),
    ),
    "The run": ("name", "run_dir", "resume", "log", "run", "as_json"),
}
GROUPED = ("train", "optimize", "run", "runner")
"""The commands whose options are many."""


def panel_of(name: str, panels: Mapping[str, Iterable[str]]) -> str | None:
    """The panel that a command or an option stands in."""
    return next((panel for panel, names in panels.items() if name in names), None)


def group_options(command: Any) -> Any:
    """A command with its options in panels, in the order of the table; what the table lacks stays in front."""
    order = list(OPTIONS)
    for parameter in command.params:
        if getattr(parameter, "rich_help_panel", None) is None:
            parameter.rich_help_panel = panel_of(parameter.name, OPTIONS)
    command.params.sort(key=lambda p: order.index(p.rich_help_panel) if p.rich_help_panel in order else -1)
    return command
