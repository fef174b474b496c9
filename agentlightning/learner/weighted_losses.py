"""Losses whose `weights_E` is a number of the loss itself, in the form of `learner.loss`; a client of `tinker` asks for
them.

Shape letters: E loss entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import Entries, gspo as token_gspo


def dro(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """DRO (Richemond et al., arXiv 2405.19107) per token: Σ −(A log π − β/2 (log π − log π_old)²).

    `weights_E` holds β.
    """
    gap_E = entries.logprobs_E - entries.old_E
    value_E = entries.advantages_E * entries.logprobs_E - entries.weights_E / 2 * gap_E.square()
    return -value_E.sum(), torch.zeros_like(gap_E, dtype=torch.bool)


def gspo(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """`learner.loss.gspo` on the tokens whose `weights_E` is 1; those of weight 0 are in no ratio."""
    chosen = torch.nonzero(entries.weights_E)[:, 0]
    clipped_E = torch.zeros_like(entries.old_E, dtype=torch.bool)
    if not len(chosen):
        return entries.logprobs_E.sum() * 0.0, clipped_E
    fields = ("logprobs_E", "old_E", "advantages_E", "weights_E", "sequence_E", "group_E")
    loss, clipped = token_gspo(Entries(**{name: getattr(entries, name)[chosen] for name in fields}), config)
    return loss, clipped_E.index_put((chosen,), clipped)
