"""The settings `agl demo math` trains with, and its tasks: the calculator's, which the model that ships knows."""

from __future__ import annotations

from typing import Any

from agentlightning.trainer.example import load_example

from .tasks import make_tasks

SETTINGS: dict[str, Any] = {
    "steps": 32,
    "tasks_per_step": 12,
    "group_size": 8,
    "minibatches": 2,
    "learning_rate": 2e-4,
    "schedule": "linear",
    "max_context": 768,
    "val_every": 16,
    "save_every": 16,
}
CONCURRENCY = 32
"""Rollouts that run at the same time: more of AutoGen's agents at once do not go faster."""

train_tasks, val_tasks, test_tasks = load_example("tools", "parts").parts_of(make_tasks)
