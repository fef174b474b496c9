"""The settings `agl demo bidding` trains with, and its tasks: the defaults, and games against two rivals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .game import make_tasks

AGENT = "bidder"
MODEL = str(Path(__file__).parent / "model")
SETTINGS: dict[str, Any] = {"steps": 60, "max_context": 512}
CONCURRENCY = 128
"""Rollouts that run at the same time: a whole step."""

_train, _held_out = make_tasks()


def train_tasks() -> list[Any]:
    return _train


def val_tasks() -> list[Any]:
    return _held_out
