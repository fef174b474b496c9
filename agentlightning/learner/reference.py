"""A reference that follows the policy: now and then it moves a share of the way to it.

    π_ref ← α π + (1 − α) π_ref, in the weights (TR-DPO: Gorbatovski et al., arXiv 2404.09656, eq. 3 and 4)

With α = 1 it is replaced (a refresh); with a small α in every step it is an exponential moving average of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError
from agentlightning.learner.policy import Policy

Pairs = list[tuple[Tensor, Tensor]]


def paired(policy: Policy, reference: PreTrainedModel | None) -> Pairs:
    """Each tensor of the reference with the policy's. An adapter's reference is an adapter beside it, which begins as
    one that changes nothing where it was the model beneath.

    Raises ConfigError for a reference of another shape than the policy.
    """
    if reference is None:
        return policy.reference_pairs()
    if policy.peft is not None:
        raise ConfigError("The reference is a whole model and the policy an adapter, so it cannot follow the policy.")
    ours, theirs = dict(policy.model.named_parameters()), dict(reference.named_parameters())
    if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
        raise ConfigError("The reference has other layers than the policy, so it cannot follow it.")
    return [(theirs[name], ours[name]) for name in theirs]


def move(pairs: Pairs, share: float) -> None:
    """Take the reference this share of the way to the policy."""
    with torch.no_grad():
        for kept, now in pairs:
            kept.lerp_(now.to(kept.dtype), share)


def put(pairs: Pairs, saved: Sequence[Tensor]) -> None:
    """Let the reference be what was saved of it."""
    with torch.no_grad():
        for (kept, _), tensor in zip(pairs, saved, strict=True):
            kept.copy_(tensor)
