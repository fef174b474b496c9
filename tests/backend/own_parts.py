"""Parts of a user's own, as they would write them beside their script; see `test_own_parts.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import Entries
from agentlightning.metrics import Sink
from agentlightning.types import Run

CONSTANT = 41.0


def rank(returns_U: np.ndarray, groups_U: np.ndarray, counts_U: np.ndarray) -> np.ndarray:
    """An advantage: 1 for the best half of the step, −1 for the others."""
    middle = np.median(returns_U[counts_U]) if counts_U.any() else 0.0
    return np.where(counts_U, np.where(returns_U > middle, 1.0, -1.0), 0.0)


def displaced(entries: Entries, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss: REINFORCE's, displaced by a constant that has no gradient."""
    loss = -(entries.weights_E * entries.advantages_E * entries.logprobs_E).sum()
    return loss + CONSTANT, torch.zeros_like(entries.old_E, dtype=torch.bool)


class Diary(Sink):
    """A sink: writes down what it hears."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.rows: list[Mapping[str, Any]] = []
        self.closed = False

    def start(self, run: Run) -> None:
        self.runs.append(run)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.rows.append(metrics)

    def close(self) -> None:
        self.closed = True
