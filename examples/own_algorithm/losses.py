"""A loss of one's own. The model process imports this file by its path, "losses:proximal"."""

from __future__ import annotations

import torch

from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import Entries

TAU = 0.1


def proximal(entries: Entries, config: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ w · (−A log π + τ/2 (log π − log π_old)²): no clipping, but a spring to the weights that sampled.

    The surrogate of mirror descent, as in Kimi k1.5 (arXiv 2501.12599, section 2.3.1), per token.
    """
    gap_E = entries.logprobs_E - entries.old_E
    loss_E = TAU / 2 * gap_E.square() - entries.advantages_E * entries.logprobs_E
    return (entries.weights_E * loss_E).sum(), torch.zeros_like(gap_E, dtype=torch.bool)
