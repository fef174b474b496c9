"""The settings `agl demo calc` trains with, and its tasks. The same as a script of your own is in
`docs/getting-started.md`."""

from __future__ import annotations

from typing import Any

from .tasks import make_tasks

SETTINGS: dict[str, Any] = {
    "steps": 48,
    "tasks_per_step": 12,
    "group_size": 8,
    "minibatches": 2,
    "learning_rate": 2e-4,
    "schedule": "linear",
    "max_context": 512,
    "max_concurrency": 64,
    "val_every": 16,
    "save_every": 16,
}
CONCURRENCY = 96
"""Rollouts that run at the same time: a whole step."""

TRAIN, VAL, TEST = 2000, 100, 400
_train, _held_out = make_tasks(TRAIN, VAL + TEST)


def train_tasks() -> list[dict[str, Any]]:
    return _train


def val_tasks() -> list[dict[str, Any]]:
    return _held_out[:VAL]


def test_tasks() -> list[dict[str, Any]]:
    """Tasks that neither training nor validation has seen."""
    return _held_out[VAL:]


def request() -> dict[str, Any]:
    """What the agent first asks the model for a task: to try the model by hand."""
    from .calc_agent import CALC_TOOL, SYSTEM_PROMPT

    question = test_tasks()[0]["question"]
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return {"messages": messages, "tools": [CALC_TOOL], "max_tokens": 64}
