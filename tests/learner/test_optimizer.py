"""Weights in bfloat16 are trained as exactly as those in float32, and go on after a resume as if nothing had been."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.optimizer import Optimizer
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import LoraSpec, load_policy
from agentlightning.learner.torch_learner import TorchLearner

RATE = OptimParams(learning_rate=1e-5, max_grad_norm=0.0)


def parameters(*values: float) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([v], dtype=torch.bfloat16)) for v in values]


def descend(optimizer: Optimizer, weights: list[torch.nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.gather()
        optimizer.step(RATE)


def test_steps_too_small_for_bfloat16_add_up() -> None:
    weights = parameters(0.5, 1.0)
    optimizer = Optimizer(weights)
    descend(optimizer, weights, 1)
    assert [w.item() for w in weights] == [0.5, 1.0], "one step is less than the last digit"
    descend(optimizer, weights, 999)
    assert [w.item() for w in weights] == pytest.approx([0.49, 0.99], abs=2e-3)


def test_gradients_of_many_passes_add_up() -> None:
    (weight,) = weights = parameters(0.0)
    optimizer = Optimizer(weights)
    for gradient in [1.0, *[1e-3] * 1000]:  # in bfloat16, 1 + 0.001 is 1
        weight.grad = torch.full_like(weight, gradient)
        optimizer.gather()
    assert optimizer.clip(0.0) == pytest.approx(2.0, rel=1e-2)


def test_a_resume_goes_on_from_the_copies_not_from_the_rounded_weights() -> None:
    through, interrupted = parameters(0.5), parameters(0.5)
    whole, first = Optimizer(through), Optimizer(interrupted)
    descend(whole, through, 600)
    descend(first, interrupted, 37)
    again = Optimizer(interrupted)
    again.load(first.state())
    descend(again, interrupted, 563)
    assert torch.equal(again.state()["copies"][0], whole.state()["copies"][0])
    assert torch.equal(interrupted[0], through[0])


def test_a_learner_in_bfloat16_follows_the_one_in_float32(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall]
) -> None:
    moved = {}
    for dtype in ("float32", "bfloat16"):
        learner = TorchLearner(load_policy(tiny_model_dir, device="cpu", dtype=dtype))
        weight = learner.policy.trainable()[0]
        before = weight.detach().float().clone()
        for _ in range(2):
            learner.forward_backward(pack(group_of_conversations), LossConfig(name="reinforce"))
            learner.optim_step(RATE)
        after = weight if dtype == "float32" else learner._optimizer.state()["copies"][0]
        moved[dtype] = after.detach() - before
    alike = torch.nn.functional.cosine_similarity(*(m.flatten() for m in moved.values()), dim=0)
    assert alike > 0.8, "Adam's first steps are signs, and small gradients have other signs in bfloat16"
    assert moved["bfloat16"].norm() > 0.8 * moved["float32"].norm()


def test_a_state_of_other_parameters_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    TorchLearner(load_policy(tiny_model_dir, device="cpu")).save_state(tmp_path / "state")
    other = TorchLearner(load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=2)))
    with pytest.raises(ConfigError, match="settings that the run began with"):
        other.load_state(tmp_path / "state")
