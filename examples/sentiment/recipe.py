"""The settings `agl demo sentiment` trains with, its model, and its tasks."""

from __future__ import annotations

from typing import Any

from .reviews import Review, make_tasks
from .smollm2 import smollm2

SETTINGS: dict[str, Any] = {
    "lora_rank": 8,
    "learning_rate": 5e-4,
    "steps": 24,
    "tasks_per_step": 8,
    "group_size": 8,
    "max_context": 256,
    "val_every": 8,
    "save_every": 8,
}
MODEL = smollm2
"""Where the model is; it is downloaded when it is asked for."""
CONCURRENCY = 64
"""Rollouts that run at the same time: a whole step."""

TRAIN, VAL, TEST = 512, 64, 200
_parts: dict[str, list[Review]] = {}


def train_tasks() -> list[Review]:
    return _tasks("train")


def val_tasks() -> list[Review]:
    return _tasks("val")


def test_tasks() -> list[Review]:
    """Tasks that neither training nor validation has seen."""
    return _tasks("test")


def _tasks(part: str) -> list[Review]:
    if not _parts:
        _parts.update(zip(("train", "val", "test"), make_tasks(TRAIN, VAL, TEST), strict=True))
    return _parts[part]
