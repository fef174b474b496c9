"""Logits of a large vocabulary: only so many exist at the same time, forward and backward."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentlightning.learner.base import LearnerOptions, LossConfig
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner


class Wide(TorchDispatchMode):
    """Follows all tensors with a value per entry of the vocabulary, however torch makes them."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._hidden = hidden
        """The output layer's own weights and their gradient have so many rows, and are there anyway."""
        self._alive: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self.largest = self.most = 0
        """Numbers of one tensor, and of all that lived at one time."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            wide = isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.shape[-1] == self._vocabulary
            if wide and tensor.shape[-2] != self._hidden:
                self._count(tensor)
        return found

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage().data_ptr()
        self._alive = {key: kept for key, kept in self._alive.items() if kept[0]() is not None}
        self._alive[storage] = (weakref.ref(tensor), tensor.numel())
        self.largest = max(self.largest, tensor.numel())
        self.most = max(self.most, sum(numbers for _, numbers in self._alive.values()))


@pytest.mark.parametrize("entropy", [0.0, 0.1])
def test_a_pass_makes_so_many_logits_at_once_and_keeps_none(
    policy: Policy, group_of_conversations: list[CreditedCall], entropy: float
) -> None:
    batch = pack(group_of_conversations)
    vocabulary, hidden = policy.model.config.vocab_size, policy.model.config.hidden_size
    seen: dict[int, Wide] = {}
    for entries in (len(batch.source_E), 4):
        learner = TorchLearner(policy, LearnerOptions(logits_at_once=entries * vocabulary))
        learner.forward(batch)  # with its trial of the model behind it
        with Wide(vocabulary, hidden) as seen[entries]:
            learner.forward_backward(batch, LossConfig(entropy_coef=entropy))
    whole, pieces = seen[len(batch.source_E)], seen[4]
    sources = len(np.unique(batch.source_E))
    assert whole.largest >= sources * vocabulary, "what is limited is there to be seen"
    assert pieces.largest == 4 * vocabulary
    # Logits, log-probs, probabilities, and a gradient or two of each, of one piece.
    assert pieces.most <= 8 * pieces.largest < whole.largest
