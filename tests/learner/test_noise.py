"""Signal and noise of a gradient: the formulas on gradients whose distribution is known, and the learner's halves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.noise import Half, noise_measures, sampled
from agentlightning.learner.packing import CreditedCall, pack
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner

LOSS = LossConfig(name="reinforce")


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_the_estimates_are_right_on_average(share: float) -> None:
    """Gradients of single samples are drawn with a known mean and variance: a batch of 16 has |G|² and tr Σ/16."""
    rng = np.random.default_rng(0)
    mean, deviation, batch, first = 0.3 * np.ones(50), 2.0, 16, round(16 * share)
    found = []
    for _ in range(2000):
        each = torch.tensor(mean + deviation * rng.standard_normal((batch, 50)))
        half, whole = each[:first].sum(0) / batch, each.mean(0)
        found.append(noise_measures(Half(half, share), whole, 1.0))
    signal = np.mean([one["gradient_signal"] for one in found])
    noise = np.mean([one["gradient_noise"] for one in found])
    assert signal == pytest.approx(float(mean @ mean), rel=0.05)
    assert noise == pytest.approx(50 * deviation**2 / batch, rel=0.02)


def test_a_sample_of_the_weights_stands_for_all_of_them() -> None:
    gradients = [torch.randn(100, 70), None, torch.randn(999)]
    everything, one = sampled(gradients)
    assert (len(everything), one) == (7999, 1.0)
    some, scale = sampled(gradients, most=500)
    assert len(some) <= 500 + len(gradients)
    assert float(some.square().sum()) * scale == pytest.approx(float(everything.square().sum()), rel=0.2)


def test_the_learner_compares_the_halves_and_takes_the_whole_step(
    tiny_model_dir: Path, group_of_conversations: list[CreditedCall]
) -> None:
    parts = [pack([c for c in group_of_conversations if c.group == group]) for group in (0, 1)]
    grads: list[torch.Tensor] = []
    for part in parts:
        learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"))
        learner.forward_backward(part, LOSS)
        grads.append(torch.cat([g.flatten() for g in learner.take_gradient() if g is not None]))
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"))
    learner.forward_backward(parts[0], LOSS)
    learner.keep_half(0.5)
    learner.forward_backward(parts[1], LOSS)
    step = learner.optim_step(OptimParams(learning_rate=0.0, max_grad_norm=0.1))
    a, b = (g.double() for g in grads)
    assert step.grad_norm == pytest.approx(float((a + b).norm()), rel=1e-5)
    assert step.metrics["gradient_cosine"] == pytest.approx(float(a @ b / a.norm() / b.norm()), rel=1e-4)
    assert step.metrics["gradient_signal"] == pytest.approx(4 * float(a @ b), rel=1e-4)
    assert step.metrics["gradient_noise"] == pytest.approx(float((a - b).square().sum()), rel=1e-4)
    learner.forward_backward(parts[0], LOSS)
    assert "gradient_cosine" not in learner.optim_step(OptimParams(learning_rate=0.0)).metrics, "only when it is asked"
