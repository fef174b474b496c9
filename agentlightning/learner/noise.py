"""Signal and noise of a gradient, from the gradients of two halves of its batch. Pure but for reading tensors.

With G₁ and G₂ the mean gradients of the two halves, f the first one's share of the batch, and G the true gradient:

    |G|²    is estimated by  G₁ · G₂                      the signal; unbiased, since the halves are independent
    tr Σ/B  is estimated by  f (1 − f) |G₁ − G₂|²         the noise: the variance of the whole batch's gradient

McCandlish et al., arXiv 1812.06162, appendix A.1, with B_small one half and B_big both of them: with f = 1/2 its
estimates of |G|² and of tr Σ are these. The simple noise scale, tr Σ / |G|² (eq. 2.9), is the batch size from which on
larger batches teach little more. Either estimate is noisy itself: average each over steps before dividing them.

Gradients are compared over a sample of the weights, evenly spread, so that a half costs megabytes to keep however large
the model is; the sample's squares are scaled up to all weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLED_WEIGHTS = 1 << 22
"""In how many weights gradients are compared; all of them in a model that has no more."""


@dataclass(frozen=True, slots=True, eq=False)
class Half:
    """The gradient of the first half of a batch, in the sampled weights."""

    sample: Tensor
    share: float
    """How much of the batch it is."""


def sampled(gradients: Iterable[Tensor | None], most: int = SAMPLED_WEIGHTS) -> tuple[Tensor, float]:
    """The gradient in at most about `most` weights, on the CPU, and how many weights one of them stands for."""
    found = [g.detach().flatten() for g in gradients if g is not None]
    total = sum(len(g) for g in found)
    stride = max(-(-total // most), 1)
    taken = torch.cat([g[::stride].float() for g in found]).cpu() if found else torch.zeros(0)
    return taken, total / max(len(taken), 1)


def noise_measures(half: Half, whole: Tensor, scale: float) -> dict[str, float]:
    """`gradient_cosine` of the two halves, `gradient_signal` and `gradient_noise`; see the module."""
    first = half.sample.double() / half.share
    second = (whole.double() - half.sample.double()) / (1 - half.share)
    dot, norms = float(first @ second), float(first.norm() * second.norm())
    return {
        "gradient_cosine": dot / norms if norms else 0.0,
        "gradient_signal": dot * scale,
        "gradient_noise": half.share * (1 - half.share) * float((first - second).square().sum()) * scale,
    }
