"""Batches cut for several ranks: nothing lost or doubled, and losses and gradients add up to the whole tree's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentlightning.learner.base import LossConfig, PackedBatch
from agentlightning.learner.packing import CreditedCall, RankPart, pack, split_batch
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner


def gradients(learner: TorchLearner) -> list[torch.Tensor]:
    parameters = learner.policy.trainable()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


@pytest.mark.parametrize("parts", [1, 2, 4, 9])
@pytest.mark.parametrize(("loss", "whole_groups"), [("ppo_clip", False), ("gspo", False), ("reinforce", True)])
def test_parts_add_up_to_the_whole(
    policy: Policy, group_of_conversations: list[CreditedCall], parts: int, loss: str, whole_groups: bool
) -> None:
    learner, batch = TorchLearner(policy), pack(group_of_conversations)
    expected = learner.forward_backward(batch, LossConfig(name=loss))
    whole = gradients(learner)
    found = split_batch(batch, parts, whole_groups=whole_groups)
    assert len(found) == parts
    results = [learner.forward_backward(part.batch, LossConfig(name=loss)) for part in found]
    assert sum(r.loss for r in results) == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    for ours, theirs in zip(gradients(learner), whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max() + 1e-12))
    logprobs = np.full(len(batch.source_E), np.nan)
    for part, result in zip(found, results, strict=True):
        logprobs[part.entries] = result.logprobs[: len(part.entries)]
    np.testing.assert_allclose(logprobs, expected.logprobs, atol=1e-5)


def test_units_stay_whole_and_loads_are_even(group_of_conversations: list[CreditedCall]) -> None:
    batch = pack(group_of_conversations)
    for whole_groups, unit_E in ((False, batch.sequence_E), (True, batch.group_E)):
        parts = split_batch(batch, 2, whole_groups=whole_groups)
        assert sorted(np.concatenate([p.entries for p in parts]).tolist()) == list(range(len(unit_E)))
        units = [set(unit_E[p.entries].tolist()) for p in parts]
        assert not units[0] & units[1]
        assert all(units)
        sizes = [len(p.batch.ids_N) for p in parts]
        assert max(sizes) < 0.75 * len(batch.ids_N)
    assert same(split_batch(batch, 3), split_batch(batch, 3)), "all ranks must cut alike"


def test_a_rank_without_work_has_a_token_that_counts_nothing(group_of_conversations: list[CreditedCall]) -> None:
    batch = pack(group_of_conversations)
    idle = [part for part in split_batch(batch, 5, whole_groups=True) if not len(part.entries)]
    assert len(idle) == 3, "there are two groups"
    assert len(idle[0].batch.ids_N) == 1
    assert not idle[0].batch.weights_E.any()


def same(ours: list[RankPart], theirs: list[RankPart]) -> bool:
    fields = PackedBatch.__struct_fields__
    return all(
        np.array_equal(getattr(a.batch, f), getattr(b.batch, f))
        for a, b in zip(ours, theirs, strict=True)
        for f in fields
        if getattr(a.batch, f) is not None
    )
