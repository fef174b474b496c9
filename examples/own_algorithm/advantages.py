"""An advantage of one's own: how many siblings a rollout beats, whatever the scale of the rewards."""

from __future__ import annotations

import numpy as np


def wins_less_losses(returns_U: np.ndarray, groups_U: np.ndarray, counts_U: np.ndarray) -> np.ndarray:
    """(siblings that earned less − siblings that earned more) / siblings. A masked rollout is nobody's sibling."""
    siblings_UU = (groups_U[:, None] == groups_U) & counts_U & ~np.eye(len(groups_U), dtype=bool)
    wins_U = (np.sign(returns_U[:, None] - returns_U) * siblings_UU).sum(axis=1)
    return np.where(counts_U, wins_U / np.maximum(siblings_UU.sum(axis=1), 1), 0.0)
