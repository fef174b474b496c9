"""The settings `agl demo math` trains with, and its tasks: the calculator's, which the model that ships knows."""

from __future__ import annotations

from typing import Any

from agentlightning.cli.example import load_example

_calc = load_example("calc", "recipe")

SETTINGS: dict[str, Any] = {**_calc.SETTINGS, "max_context": 768, "steps": 32}
CONCURRENCY = 32
"""Rollouts that run at the same time: more of AutoGen's agents at once do not go faster."""


def train_tasks() -> list[dict[str, Any]]:
    return _calc.train_tasks()


def val_tasks() -> list[dict[str, Any]]:
    return _calc.val_tasks()


def test_tasks() -> list[dict[str, Any]]:
    return _calc.test_tasks()[:200]
