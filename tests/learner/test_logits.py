"""Logits of a large vocabulary: only so many exist at the same time, forward and backward."""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
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


@pytest.mark.parametrize("entries", [4, 10_000])
def test_how_often_a_target_is_the_likeliest_token(
    policy: Policy, group_of_conversations: list[CreditedCall], entries: int
) -> None:
    """Whatever the temperature and in how many pieces; nothing else changes."""
    batch = pack(group_of_conversations)
    vocabulary = policy.model.config.vocab_size
    learner = TorchLearner(policy, LearnerOptions(logits_at_once=entries * vocabulary))
    with torch.no_grad():
        likeliest_E = np.concatenate(
            [
                policy.model(torch.from_numpy(np.concatenate([call.prompt_ids, call.response_ids]).astype(int))[None])
                .logits[0, len(call.prompt_ids) - 1 : -1]
                .argmax(-1)
                .numpy()
                for call in (credited.call for credited in group_of_conversations)
            ]
        )
    third_E = np.arange(len(likeliest_E)) % 3 == 0
    targets_E = np.where(third_E, likeliest_E, batch.targets_E).astype(np.int32)
    batch = msgspec.structs.replace(batch, targets_E=targets_E)
    wanted = float((targets_E == likeliest_E).mean())
    assert 0.3 < wanted < 0.5
    plain = learner.evaluate(batch, LossConfig())
    measured = learner.evaluate(batch, LossConfig(token_accuracy=True))
    assert measured.metrics.pop("token_accuracy") == pytest.approx(wanted)
    assert (plain.loss, plain.metrics) == (measured.loss, measured.metrics)
    passed = learner.forward_backward(batch, LossConfig(token_accuracy=True))
    assert passed.metrics["token_accuracy"] == pytest.approx(wanted)
