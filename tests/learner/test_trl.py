"""Losses against trl's own: its numbers for the same tensors, made by `scripts/trl_losses.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.algorithm.credit.ratios import entry_weights
from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import Entries, compute_loss

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "trl_losses.json").read_text())
OURS = {
    "grpo": (LossConfig(clip_low=0.2, clip_high=0.28), "rollout"),
    "grpo_kl": (LossConfig(clip_low=0.2, clip_high=0.28, kl_coef=0.1, kl_estimator="k3"), "rollout"),
    "dapo": (LossConfig(clip_low=0.2, clip_high=0.28), "token"),
    "dapo_entropy": (LossConfig(clip_low=0.2, clip_high=0.28, entropy_coef=0.05), "token"),
    "dr_grpo": (LossConfig(clip_low=0.2, clip_high=0.28), "constant"),
    "gspo": (LossConfig(name="gspo", clip_low=0.03, clip_high=0.04), "rollout"),
    "cispo": (LossConfig(name="cispo", clip_low=1.0, clip_high=0.2), "token"),
}


@pytest.mark.parametrize("name", OURS)
def test_loss_and_gradient_are_trls(name: str) -> None:
    given, wanted = RECORDED["given"], RECORDED["cases"][name]
    config, normalization = OURS[name]
    lengths = torch.tensor(given["lengths"])
    rollouts = torch.arange(len(lengths)).repeat_interleave(lengths)
    tokens = np.array(given["lengths"], np.int32)
    weights = entry_weights(tokens, np.ones(len(tokens), bool), normalization, given["max_completion"])

    def tensor(key: str) -> torch.Tensor:
        return torch.tensor(given[key], dtype=torch.float64)

    logprobs, entropy = tensor("new").requires_grad_(), tensor("entropy").requires_grad_()
    entries = Entries(
        logprobs_E=logprobs,
        old_E=tensor("old"),
        advantages_E=tensor("advantages")[rollouts],
        weights_E=torch.tensor(weights)[rollouts],
        sequence_E=rollouts,
        group_E=torch.zeros_like(rollouts),
        entropy_E=entropy,
        reference_E=tensor("reference"),
    )
    loss, metrics = compute_loss(entries, config)
    loss.backward()
    assert logprobs.grad is not None
    assert loss.item() == pytest.approx(wanted["loss"], rel=1e-6)
    assert logprobs.grad.tolist() == pytest.approx(wanted["gradient"], rel=1e-6, abs=1e-9)
    if config.entropy_coef:
        assert entropy.grad is not None
        assert entropy.grad.tolist() == pytest.approx(wanted["entropy_gradient"], rel=1e-6)
    if config.name != "reinforce":
        assert 0 < metrics["clip_fraction"] < 1, "the recorded case has to touch the clip"
