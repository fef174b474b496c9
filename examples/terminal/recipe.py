"""The settings `agl demo terminal` trains with, its model, and its tasks."""

from __future__ import annotations

from functools import partial
from typing import Any

from agentlightning.trainer.example import load_example

from .repositories import make_tasks

SETTINGS: dict[str, Any] = {
    "steps": 24,
    "tasks_per_step": 8,
    "group_size": 8,
    "minibatches": 2,
    "learning_rate": 5e-4,
    "schedule": "linear",
    "max_context": 2048,
    "max_calls": 12,
    "val_every": 8,
    "save_every": 8,
}
MODEL = partial(load_example("tools", "cached").cached_model, "terminal")
"""Where the model is; it is made when it is first asked for."""
CONCURRENCY = 16
"""Rollouts that run at the same time: each is a process of Codex, of 100 MB or so."""

train_tasks, val_tasks, test_tasks = load_example("tools", "parts").parts_of(make_tasks)
