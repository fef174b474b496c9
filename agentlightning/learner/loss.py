"""Losses: pure functions of log-probs, advantages and weights per entry. Tensors in, loss and metrics out.

Every loss is a sum over entries weighted by `weights_E`, so that normalisation is the caller's choice. An entry is a
sampled token on one leaf's path: where siblings sampled the same token, it has an entry for each of them, so KL and
entropy weigh by leaf.

Shape letters: E loss entries (sampled tokens), Q sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig
from agentlightning.learner.catalog import find_loss

Metrics = dict[str, float]
DUAL_CLIP = 3.0
SAPO_TAU = (1.0, 1.05)
"""For advantages above 0, and for the others."""
COV_BOUNDS, CLIP_COV_SHARE = (1.0, 5.0), 2e-4
KL_COV_SHARE, KL_COV_BETA = 2e-3, 1.0
"""Of Clip-Cov and of KL-Cov, as in the paper's experiments."""
Chosen = TypeVar("Chosen")


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What a loss is a function of."""

    logprobs_E: Tensor
    """Under the weights in training, with gradient."""
    old_E: Tensor
    """Under the weights that the ratio starts from."""
    advantages_E: Tensor
    weights_E: Tensor
    sequence_E: Tensor
    group_E: Tensor
    entropy_E: Tensor | None = None
    """Of the distribution each target was sampled from; with gradient if the loss has an entropy bonus."""
    reference_E: Tensor | None = None
    """Under the reference model."""

    @property
    def reference(self) -> Tensor:
        if self.reference_E is None:
            raise ConfigError("This loss compares with a reference model, and the learner has none.")
        return self.reference_E


LossFunction = Callable[[Entries, LossConfig], tuple[Tensor, Tensor]]
"""Returns the loss and which entries were clipped."""


def reinforce(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """REINFORCE (Williams 1992): Σ w · −A log π; on-policy only, so the old log-probs play no part.

    With advantage 1 it is the cross-entropy of supervised fine-tuning.
    """
    loss = -(entries.weights_E * entries.advantages_E * entries.logprobs_E).sum()
    return loss, torch.zeros_like(entries.old_E, dtype=torch.bool)


def ppo_clip(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The clipped surrogate of PPO (Schulman et al., arXiv 1707.06347, eq. 7), as GRPO uses it per token.

    Σ w · −min(r A, clip(r, 1 − low, 1 + high) A). `clip_high` above `clip_low` is DAPO's clip-higher (Yu et al., arXiv
    2503.14476, eq. 8).
    """
    return _clipped_surrogate(torch.exp(entries.logprobs_E - entries.old_E), entries, config)


def gspo(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """GSPO (Zheng et al., arXiv 2507.18071) in its token form (eq. 13 and 14), which allows advantages per token.

    The ratio of a sequence is the geometric mean of its tokens' ratios. A token takes its sequence's ratio as value and
    its own log-prob for the gradient; with one advantage and one weight per sequence that is GSPO's own gradient.
    """
    gap_E = entries.logprobs_E - entries.old_E
    _, row_E, count_Q = entries.sequence_E.unique(return_inverse=True, return_counts=True)
    mean_Q = _sums(len(count_Q), row_E, gap_E.detach()) / count_Q
    own_E = torch.exp(entries.logprobs_E - entries.logprobs_E.detach())
    return _clipped_surrogate(mean_Q.exp()[row_E] * own_E, entries, config)


def dual_clip(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """PPO's surrogate, bounded for what went wrong too: max(min(r A, clip(r) A), c A) where A < 0, with c = 3.

    Ye et al., arXiv 1912.09729, eq. 5: a token that became much likelier and should not be has no endless gradient.
    """
    ratio_E = torch.exp(entries.logprobs_E - entries.old_E)
    clipped_E = ratio_E.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    advantages_E = entries.advantages_E
    free_E, bounded_E = ratio_E * advantages_E, clipped_E * advantages_E
    least_E = torch.where(advantages_E < 0, DUAL_CLIP * advantages_E, -torch.inf)
    value_E = torch.maximum(torch.minimum(free_E, bounded_E), least_E)
    return -(entries.weights_E * value_E).sum(), value_E != free_E


def gmpo(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """GMPO (Zhao et al., arXiv 2507.20673, eq. 4): the geometric mean of a sequence's clipped token ratios, times A.

    Token ratios are clipped in log space, on the side that A pushes to, to [−`clip_low`, `clip_high`]; the paper has
    0.4 on both sides. One advantage per sequence is meant.
    """
    gap_E = entries.logprobs_E - entries.old_E
    held_E = torch.where(entries.advantages_E > 0, gap_E.clamp(max=config.clip_high), gap_E.clamp(min=-config.clip_low))
    _, row_E, count_Q = entries.sequence_E.unique(return_inverse=True, return_counts=True)
    ratio_E = (_sums(len(count_Q), row_E, held_E) / count_Q).exp()[row_E]
    return -(entries.weights_E * entries.advantages_E * ratio_E).sum(), held_E != gap_E


def sapo(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """SAPO (Gao et al., arXiv 2511.20347): a soft gate instead of a clip, Σ w · −A · 4/τ · σ(τ (r − 1)).

    Its gradient at r = 1 is that of r A and fades on both sides; τ is 1 for A > 0 and 1.05 otherwise.
    """
    ratio_E = torch.exp(entries.logprobs_E - entries.old_E)
    tau_E = torch.where(entries.advantages_E > 0, *SAPO_TAU)
    gate_E = 4 / tau_E * torch.sigmoid(tau_E * (ratio_E - 1))
    loss = -(entries.weights_E * entries.advantages_E * gate_E).sum()
    return loss, torch.zeros_like(entries.old_E, dtype=torch.bool)


def cispo(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4): Σ w · −sg(clip(r)) A log π; a clipped token keeps its gradient."""
    ratio_E = torch.exp(entries.logprobs_E.detach() - entries.old_E)
    bounded_E = ratio_E.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss = -(entries.weights_E * bounded_E * entries.advantages_E * entries.logprobs_E).sum()
    return loss, bounded_E != ratio_E


def dppo_tv(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """DPPO with total variation (arXiv 2602.04879): Σ w · −M r A, where M leaves out a token that has moved too far.

    It has when A pushes it on in the direction it went, and |π − π_old| of the sampled token is above `clip_high`
    upwards, above `clip_low` downwards (the paper's δ, about 0.2). So a rare token may multiply, and a likely one may
    not vanish, unlike with a clip of the ratio.
    """
    moved_E = (entries.logprobs_E.detach().exp() - entries.old_E.exp()).abs()
    return _masked_surrogate(moved_E, entries, config)


def dppo_kl(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """The same with KL(π_old ‖ π) between "this token" and "any other", in nats (the paper's δ is about 0.05)."""
    new_E, old_E = entries.logprobs_E.detach().exp(), entries.old_E.exp()
    tiny = torch.finfo(new_E.dtype).tiny
    others_E = torch.log((1 - old_E).clamp(min=tiny) / (1 - new_E).clamp(min=tiny))
    moved_E = old_E * (entries.old_E - entries.logprobs_E.detach()) + (1 - old_E) * others_E
    return _masked_surrogate(moved_E, entries, config)


def clip_cov(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """Clip-Cov (Cui et al., arXiv 2505.22617, eq. 11): the surrogate without a few of the tokens that cost entropy.

    Among tokens whose covariance (log π − mean)(A − mean) lies in `COV_BOUNDS` a share of `CLIP_COV_SHARE` of all
    tokens, at least one, is left out, chosen by chance. Means are over the entries of a pass.
    """
    covariance_E = _covariance(entries)
    inside = torch.nonzero((covariance_E > COV_BOUNDS[0]) & (covariance_E < COV_BOUNDS[1]))[:, 0]
    chance = torch.Generator().manual_seed(len(covariance_E))
    drawn = torch.randperm(len(inside), generator=chance)[: _few(covariance_E, CLIP_COV_SHARE)]
    chosen = inside[drawn.to(inside.device)]
    kept_E = torch.ones_like(covariance_E).index_fill(0, chosen, 0.0)
    loss, clipped_E = ppo_clip(replace(entries, weights_E=entries.weights_E * kept_E), config)
    return loss, clipped_E | (kept_E == 0)


def kl_cov(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """KL-Cov (Cui et al., arXiv 2505.22617, eq. 12): Σ w · −(r A − β |log π − log π_old| of the top tokens).

    The share `KL_COV_SHARE` of tokens, at least one, with the highest covariance (see `clip_cov`) has the penalty, with
    β = 1 as the paper; nothing else is clipped.
    """
    gap_E = entries.logprobs_E - entries.old_E
    covariance_E = _covariance(entries)
    top_E = torch.zeros_like(covariance_E)
    top_E[covariance_E.topk(_few(covariance_E, KL_COV_SHARE)).indices] = 1.0
    value_E = gap_E.exp() * entries.advantages_E - KL_COV_BETA * top_E * gap_E.abs()
    return -(entries.weights_E * value_E).sum(), top_E > 0


def dpo(entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    """DPO (Rafailov et al., arXiv 2305.18290, eq. 7): −log σ(β Σ ±(log π − log π_ref)), one pair per group.

    The advantage is the sign: +1 on the preferred rollout's tokens, −1 on the other's. A pair's weight is the sum of
    its tokens' weights.
    """
    _, row_E = entries.group_E.unique(return_inverse=True)
    pairs = int(row_E.max()) + 1
    margin_P = _sums(pairs, row_E, entries.advantages_E * (entries.logprobs_E - entries.reference))
    weights_P = _sums(pairs, row_E, entries.weights_E.to(margin_P.dtype))
    loss = -(weights_P * logsigmoid(config.dpo_beta * margin_P)).sum()
    return loss, torch.zeros_like(entries.old_E, dtype=torch.bool)


def _sums(count: int, row_E: Tensor, values_E: Tensor) -> Tensor:
    """The sum of each row's values, [count]. On a GPU `index_add` adds in an order that changes from call to call, and
    with it the last bit; `index_put` sorts first."""
    zeros = torch.zeros(count, dtype=values_E.dtype, device=values_E.device)
    if values_E.device.type == "cuda":
        return zeros.index_put((row_E,), values_E, accumulate=True)
    return zeros.index_add(0, row_E, values_E)


def _clipped_surrogate(ratio_E: Tensor, entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    clipped_E = ratio_E.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    free, bounded = ratio_E * entries.advantages_E, clipped_E * entries.advantages_E
    return -(entries.weights_E * torch.minimum(free, bounded)).sum(), bounded < free


def _masked_surrogate(moved_E: Tensor, entries: Entries, config: LossConfig) -> tuple[Tensor, Tensor]:
    ratio_E, up_E = torch.exp(entries.logprobs_E - entries.old_E), entries.advantages_E > 0
    onwards_E = torch.where(up_E, ratio_E > 1, ratio_E < 1)
    masked_E = onwards_E & (moved_E > torch.where(up_E, config.clip_high, config.clip_low))
    return -(entries.weights_E * ratio_E * entries.advantages_E * ~masked_E).sum(), masked_E


def _covariance(entries: Entries) -> Tensor:
    logprobs_E, advantages_E = entries.logprobs_E.detach(), entries.advantages_E
    return (logprobs_E - logprobs_E.mean()) * (advantages_E - advantages_E.mean())


def _few(values_E: Tensor, share: float) -> int:
    return max(int(share * len(values_E)), 1)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda gap_E: gap_E,
    "k2": lambda gap_E: gap_E.square() / 2,
    "k3": lambda gap_E: torch.expm1(-gap_E) + gap_E,
}
"""Per-token estimates of KL(π ‖ π_ref) from gap = log π − log π_ref (Schulman, "Approximating KL divergence", 2020).

As a loss k2 has the gradient of the true KL when on-policy; k1 has none in expectation and is meant for rewards."""


def compute_loss(entries: Entries, config: LossConfig) -> tuple[Tensor, Metrics]:
    """The configured loss and its metrics. Metrics are means over the entries but for `loss`, a sum."""
    loss, clipped_E = find_loss(config.name)(entries, config)
    metrics: Metrics = {}
    if config.entropy_coef and entries.entropy_E is not None:
        loss = loss - config.entropy_coef * (entries.weights_E * entries.entropy_E).sum()
    if config.kl_coef:
        kl_E = _choose(KL_ESTIMATORS, config.kl_estimator, "KL estimator")(entries.logprobs_E - entries.reference)
        loss = loss + config.kl_coef * (entries.weights_E * kl_E).sum()
    with torch.no_grad():
        if entries.reference_E is not None:
            metrics["kl_reference"] = KL_ESTIMATORS["k3"](entries.logprobs_E - entries.reference).mean().item()
        if entries.entropy_E is not None:
            metrics["entropy"] = entries.entropy_E.mean().item()
        gap_E = entries.logprobs_E - entries.old_E
        metrics |= {
            "loss": loss.item(),
            "clip_fraction": clipped_E.float().mean().item(),
            # k3 of the divergence from the weights that sampled: E[(r − 1) − log r]
            "kl_old": (torch.expm1(gap_E) - gap_E).mean().item(),
        }
    return loss, metrics


def _choose(table: Mapping[str, Chosen], name: str, noun: str) -> Chosen:
    if name not in table:
        raise ConfigError(f"There is no {noun} '{name}'. Choose one of: {', '.join(sorted(table))}.")
    return table[name]
