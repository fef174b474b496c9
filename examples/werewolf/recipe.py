"""The settings `agl demo werewolf` trains with, its model, and its tasks: the games that are dealt."""

from __future__ import annotations

from functools import partial
from typing import Any

from agentlightning.trainer.example import load_example

from .tasks import make_tasks

SETTINGS: dict[str, Any] = {
    "policies": ["wolves"],
    "frozen": "village",
    "lora_rank": 16,
    "steps": 16,
    "tasks_per_step": 4,
    "group_size": 6,
    "minibatches": 2,
    "credit": "return_to_go",
    "learning_rate": 5e-3,
    "max_kl": 0.005,
    "schedule": "linear",
    "max_context": 1280,
    "cut_long_prompts": True,
    "max_calls": 100,
    "max_tokens": 4000,
    "val_every": 8,
    "save_every": 8,
}
MODEL = partial(load_example("tools", "cached").cached_model, "werewolf")
"""Where the model is; it is made when it is first asked for."""
CONCURRENCY = 24
"""Games that are played at the same time: a whole step."""

train_tasks, val_tasks, test_tasks = load_example("tools", "parts").parts_of(make_tasks)
