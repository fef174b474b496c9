"""Losses against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import Entries, compute_loss


def evaluate(
    ratios: list[float], advantages: list[float], config: LossConfig
) -> tuple[float, dict[str, float], list[float]]:
    """Loss, metrics and the gradient by log-prob, with weights that make the mean."""
    old = torch.full((len(ratios),), -1.0)
    logprobs = (old + torch.tensor(ratios).log()).requires_grad_()
    weights = torch.full((len(ratios),), 1 / len(ratios))
    zeros = torch.zeros(len(ratios), dtype=torch.int32)
    entries = Entries(logprobs, old, torch.tensor(advantages), weights, zeros, zeros)
    loss, metrics = compute_loss(entries, config)
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), metrics, logprobs.grad.tolist()


def test_inside_the_clip_the_gradient_is_ratio_times_advantage() -> None:
    loss, metrics, gradient = evaluate([1.1, 0.9], [2.0, -1.0], LossConfig())
    assert loss == pytest.approx(-(2.2 - 0.9) / 2)
    assert gradient == pytest.approx([-1.1, 0.45])
    assert metrics["clip_fraction"] == 0.0


def test_clipping_stops_what_went_too_far_and_only_that() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    # too far up with A > 0: clipped. too far down with A < 0: clipped. the other two must still be pulled back.
    _, metrics, gradient = evaluate([1.3, 0.7, 1.3, 0.7], [1.0, -1.0, -1.0, 1.0], config)
    assert gradient == pytest.approx([0.0, 0.0, 1.3 / 4, -0.7 / 4])
    assert metrics["clip_fraction"] == 0.5


def test_clip_higher_leaves_more_room_upwards() -> None:
    assert evaluate([1.25], [1.0], LossConfig(clip_low=0.2, clip_high=0.28))[2] == pytest.approx([-1.25])
    assert evaluate([1.25], [1.0], LossConfig(clip_low=0.2, clip_high=0.2))[2] == pytest.approx([0.0])


def test_on_policy_ppo_has_the_gradient_of_reinforce() -> None:
    ppo = evaluate([1.0, 1.0], [2.0, -3.0], LossConfig())
    plain = evaluate([1.0, 1.0], [2.0, -3.0], LossConfig(name="reinforce"))
    assert ppo[2] == pytest.approx(plain[2])


def test_metrics() -> None:
    _, metrics, _ = evaluate([math.e], [1.0], LossConfig())
    assert metrics["kl_old"] == pytest.approx(math.e - 2.0, rel=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(1.0, rel=1e-5)


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ConfigError, match="no loss 'magic'"):
        evaluate([1.0], [1.0], LossConfig(name="magic"))
