"""What KL and DPO compare with is the model that the run started from, also where that is an adapter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentlightning.errors import ModelError
from agentlightning.learner.base import LearnerOptions, LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.models import resolve_model

KL = LossConfig(name="reinforce", kl_coef=0.1)


def moved(policy: Policy) -> Policy:
    """Its trained weights somewhere else."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return policy


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_a_run_from_a_trained_model_or_adapter_starts_at_its_reference(
    tiny_model_dir: Path, tmp_path: Path, group_of_conversations: list[CreditedCall], lora: LoraSpec | None
) -> None:
    start, checkpoint = str(tmp_path / "start"), str(tmp_path / "checkpoint")
    moved(load_policy(tiny_model_dir, device="cpu", lora=lora)).export(start)
    batch = pack(group_of_conversations)
    learner = TorchLearner(load_policy(start, device="cpu"), LearnerOptions(reference=start))
    before = learner.forward(batch)
    np.testing.assert_allclose(learner.forward(batch, reference=True), before, atol=1e-6)
    for _ in range(2):
        learner.forward_backward(batch, KL)
        learner.optim_step(OptimParams(learning_rate=1e-2))
    assert np.abs(learner.forward(batch) - before).max() > 0.01
    np.testing.assert_allclose(learner.forward(batch, reference=True), before, atol=1e-6)
    learner.export(checkpoint)
    resumed = TorchLearner(load_policy(checkpoint, device="cpu"), LearnerOptions(reference=start))
    np.testing.assert_allclose(resumed.forward(batch), learner.forward(batch), atol=1e-6)
    np.testing.assert_allclose(resumed.forward(batch, reference=True), before, atol=1e-6)


def test_a_new_adapters_reference_is_its_base(tiny_model_dir: Path, group_of_conversations: list[CreditedCall]) -> None:
    batch = pack(group_of_conversations)
    policy = load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=4))
    learner = TorchLearner(policy, LearnerOptions(reference=str(tiny_model_dir)))
    before = learner.forward(batch)
    trained = [n for n, p in policy.model.named_parameters() if p.requires_grad]
    moved(policy)
    np.testing.assert_allclose(learner.forward(batch, reference=True), before, atol=1e-6)
    assert [n for n, p in policy.model.named_parameters() if p.requires_grad] == trained


def test_a_new_adapter_follows_from_its_seed(tiny_model_dir: Path) -> None:
    def first_weights(seed: int) -> torch.Tensor:
        policy = load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=4, seed=seed))
        return next(p for name, p in policy.model.named_parameters() if "lora_A" in name).detach()

    assert torch.equal(first_weights(1), first_weights(1))
    assert not torch.equal(first_weights(1), first_weights(2))


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_a_teacher_is_a_model_of_its_own(
    tiny_model_dir: Path, tmp_path: Path, group_of_conversations: list[CreditedCall], lora: LoraSpec | None
) -> None:
    """Whatever is trained, and whether the teacher is a whole model or an adapter on the same base."""
    batch = pack(group_of_conversations)
    for kind in (None, LoraSpec(rank=2, seed=5)):
        teacher = moved(load_policy(tiny_model_dir, device="cpu", lora=kind))
        path = str(tmp_path / f"teacher-{kind is None}")
        teacher.export(path)
        expected = TorchLearner(teacher).forward(batch)
        student = TorchLearner(load_policy(tiny_model_dir, device="cpu", lora=lora), LearnerOptions(reference=path))
        np.testing.assert_allclose(student.forward(batch, reference=True), expected, atol=1e-5)
        assert np.abs(student.forward(batch) - expected).max() > 0.01


def test_a_teacher_with_other_tokens_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ModelError, match="has other tokens"):
        TorchLearner(load_policy(tiny_model_dir, device="cpu"), LearnerOptions(reference=resolve_model("calc")))
