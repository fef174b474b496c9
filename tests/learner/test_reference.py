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


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4)], ids=["full", "lora"])
def test_a_reference_follows_the_policy_and_is_kept_with_the_optimiser(
    tiny_model_dir: Path, tmp_path: Path, group_of_conversations: list[CreditedCall], lora: LoraSpec | None
) -> None:
    batch, options = pack(group_of_conversations), LearnerOptions(reference=str(tiny_model_dir))
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu", lora=lora), options)
    start = learner.forward(batch)
    moved(learner.policy)
    now = learner.forward(batch)
    learner.move_reference(0.25)
    between = learner.forward(batch, reference=True)
    assert np.abs(between - start).max() > 1e-4 < np.abs(between - now).max(), "it went a part of the way"
    np.testing.assert_allclose(learner.forward(batch), now, atol=1e-6)
    learner.save_state(tmp_path / "optimizer")
    learner.export(tmp_path / "model")
    resumed = TorchLearner(load_policy(tmp_path / "model", device="cpu", lora=lora), options)
    resumed.load_state(tmp_path / "optimizer")
    np.testing.assert_allclose(resumed.forward(batch, reference=True), between, atol=1e-6)
    for one in (learner, resumed):
        one.move_reference(1.0)
        np.testing.assert_allclose(one.forward(batch, reference=True), now, atol=1e-6)
        assert all(p.requires_grad for p in one.policy.trainable()), "and the policy goes on learning"


def test_a_moving_average_of_all_weights_is_the_one_of_the_paper(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall]
) -> None:
    """θ_ref ← α θ + (1 − α) θ_ref, computed by hand over three moves."""
    policy = load_policy(tiny_model_dir, device="cpu")
    learner = TorchLearner(policy, LearnerOptions(reference=str(tiny_model_dir)))
    expected = [p.detach().clone() for p in policy.trainable()]
    for _ in range(3):
        moved(policy)
        learner.move_reference(0.1)
        expected = [0.1 * p.detach() + 0.9 * e for p, e in zip(policy.trainable(), expected, strict=True)]
    own = load_policy(tiny_model_dir, device="cpu")
    with torch.no_grad():
        for parameter, value in zip(own.trainable(), expected, strict=True):
            parameter.copy_(value)
    batch = pack(group_of_conversations)
    np.testing.assert_allclose(learner.forward(batch, reference=True), TorchLearner(own).forward(batch), atol=1e-5)
