"""The settings `agl demo support` trains with, its model, and its tasks."""

from __future__ import annotations

from functools import partial
from typing import Any

from agentlightning.trainer.example import load_example

from .cases import make_tasks

SETTINGS: dict[str, Any] = {
    "steps": 24,
    "tasks_per_step": 8,
    "group_size": 8,
    "minibatches": 2,
    "learning_rate": 3e-4,
    "schedule": "linear",
    "max_context": 2048,
    "val_every": 8,
    "save_every": 8,
}
MODEL = partial(load_example("tools", "cached").cached_model, "support")
"""Where the model is; it is made when it is first asked for."""
CONCURRENCY = 64
"""Rollouts that run at the same time: a whole step."""

train_tasks, val_tasks, test_tasks = load_example("tools", "parts").parts_of(make_tasks)
