"""Which options of the large commands stand together in the help. A test keeps the table whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "The agent and its tasks": ("agent", "tasks", "val_tasks", "env", "env_option", "data", "remote", "repeats"),
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


def _panel_of(option: str) -> str | None:
    return next((panel for panel, names in OPTIONS.items() if option in names), None)


def group_options(command: Any) -> Any:
    """A command with its options in panels, in the order of the table; what the table lacks stays in front."""
    order = list(OPTIONS)
    for parameter in command.params:
        if getattr(parameter, "rich_help_panel", None) is None:
            parameter.rich_help_panel = _panel_of(parameter.name)
    command.params.sort(key=lambda p: order.index(p.rich_help_panel) if p.rich_help_panel in order else -1)
    return command
