"""Losses: pure functions of log-probs, advantages and weights per entry. Tensors in, loss and metrics out.

Shape letters: E loss entries (sampled tokens).
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig

Metrics = dict[str, float]


def ppo_clip(
    logprobs_E: Tensor, old_logprobs_E: Tensor, advantages_E: Tensor, weights_E: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO (Schulman et al., arXiv 1707.06347, eq. 7), as GRPO uses it per token.

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv 2503.14476). Returns the loss Σ w · −min(r A, clip(r) A)
    and which entries were clipped.
    """
    ratio_E = torch.exp(logprobs_E - old_logprobs_E)
    clipped_E = ratio_E.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free, bounded = ratio_E * advantages_E, clipped_E * advantages_E
    return -(weights_E * torch.minimum(free, bounded)).sum(), bounded < free


def reinforce(
    logprobs_E: Tensor, old_logprobs_E: Tensor, advantages_E: Tensor, weights_E: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE (Williams 1992): Σ w · −A log π; on-policy only, so the old log-probs play no part."""
    return -(weights_E * advantages_E * logprobs_E).sum(), torch.zeros_like(old_logprobs_E, dtype=torch.bool)


LOSSES = {"ppo_clip": ppo_clip, "reinforce": reinforce}


def compute_loss(
    logprobs_E: Tensor,
    entropy_E: Tensor,
    old_logprobs_E: Tensor,
    advantages_E: Tensor,
    weights_E: Tensor,
    config: LossConfig,
) -> tuple[Tensor, Metrics]:
    """The configured loss and its metrics. Metrics are means over the entries but for `loss` (a sum) and `…_max`."""
    if config.name not in LOSSES:
        raise ConfigError(f"There is no loss '{config.name}'. Choose one of: {', '.join(sorted(LOSSES))}.")
    loss, clipped_E = LOSSES[config.name](logprobs_E, old_logprobs_E, advantages_E, weights_E, config)
    if config.entropy_coef:
        loss = loss - config.entropy_coef * (weights_E * entropy_E).sum()
    with torch.no_grad():
        gap_E = logprobs_E - old_logprobs_E
        metrics = {
            "loss": loss.item(),
            "entropy": entropy_E.mean().item(),
            "clip_fraction": clipped_E.float().mean().item(),
            # k3 of Schulman's note "Approximating KL divergence": E[(r − 1) − log r]
            "kl_old": (torch.expm1(gap_E) - gap_E).mean().item(),
            "logprob_gap_max": gap_E.abs().max().item(),
        }
    return loss, metrics
