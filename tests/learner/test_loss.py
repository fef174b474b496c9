"""Losses against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import KL_ESTIMATORS, Entries, compute_loss


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


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(ConfigError, match="loss is 'magic'; it can be 'cispo'"):
        evaluate([1.0], [1.0], LossConfig(name="magic"))


def test_dpo_by_hand() -> None:
    """Two tokens preferred, one not; β times the difference of their gains over the reference goes into −log σ."""
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -2.0])
    ones = torch.ones(3, dtype=torch.int32)
    signs, weights = torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0.25, 0.25, 0.5])
    entries = Entries(logprobs, logprobs.detach(), signs, weights, ones, ones, reference_E=reference)
    loss, _ = compute_loss(entries, LossConfig(name="dpo", dpo_beta=0.5))
    loss.backward()
    margin = 0.5 * (0.5 + 0.0 + 1.0)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-margin)))
    assert logprobs.grad is not None
    slope = 0.5 / (1 + math.exp(margin))
    assert logprobs.grad.tolist() == pytest.approx([-slope, -slope, slope])


def test_kl_estimators_by_hand() -> None:
    gap = torch.tensor([0.5, -0.5])
    assert KL_ESTIMATORS["k1"](gap).tolist() == pytest.approx([0.5, -0.5])
    assert KL_ESTIMATORS["k2"](gap).tolist() == pytest.approx([0.125, 0.125])
    assert KL_ESTIMATORS["k3"](gap).tolist() == pytest.approx([math.exp(-0.5) - 0.5, math.exp(0.5) - 1.5])


def test_the_entropy_bonus_has_a_gradient() -> None:
    logits = torch.tensor([[2.0, 0.0]], requires_grad=True)
    table = logits.log_softmax(-1)
    zero = torch.zeros(1)
    entries = Entries(table[:, 0], zero, zero, torch.ones(1), zero, zero, entropy_E=-(table.exp() * table).sum(-1))
    loss, _ = compute_loss(entries, LossConfig(name="reinforce", entropy_coef=1.0))
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[0, 0] > 0.05, "less certain is better"


def test_a_loss_without_its_reference_says_so() -> None:
    with pytest.raises(ConfigError, match="reference model"):
        evaluate([1.0], [1.0], LossConfig(kl_coef=0.1))


# ---- against their definitions, written out token by token ---------------------------------------------------------

RATIOS, ADVANTAGES = [1.5, 0.6, 2.6, 0.9, 1.1], [1.0, 1.0, -2.0, -2.0, 0.5]


def numerical(value: Any, ratios: list[float]) -> list[float]:
    """Derivatives of `value(ratios)` by each log ratio."""
    found = []
    for i in range(len(ratios)):
        up, down = list(ratios), list(ratios)
        up[i] *= math.exp(1e-4)
        down[i] *= math.exp(-1e-4)
        found.append((value(up) - value(down)) / 2e-4)
    return found


def of_dual_clip(ratios: list[float]) -> float:
    total = 0.0
    for r, a in zip(ratios, ADVANTAGES, strict=True):
        inner = min(r * a, min(max(r, 0.8), 1.2) * a)
        total += max(inner, 3 * a) if a < 0 else inner
    return -total / len(ratios)


def of_gmpo(ratios: list[float]) -> float:
    """All tokens of one sequence, with the advantage of the first."""
    a = 1.0
    product = math.prod(min(r, math.exp(0.4)) for r in ratios)
    return -a * product ** (1 / len(ratios))


def of_sapo(ratios: list[float]) -> float:
    total = 0.0
    for r, a in zip(ratios, ADVANTAGES, strict=True):
        tau = 1.0 if a > 0 else 1.05
        total += a * 4 / tau / (1 + math.exp(-tau * (r - 1)))
    return -total / len(ratios)


def masked_where(too_far: Any) -> Any:
    """Σ −r A / n over tokens that A does not push on beyond where `too_far(A, π, π_old)` says."""

    def value(ratios: list[float]) -> float:
        old = math.exp(-1.0)
        terms = [
            0.0 if (r - 1) * a > 0 and too_far(a, r * old, old) else r * a
            for r, a in zip(ratios, ADVANTAGES, strict=True)
        ]
        return -sum(terms) / len(terms)

    return value


def divergence_of_two(new: float, old: float) -> float:
    return old * math.log(old / new) + (1 - old) * math.log((1 - old) / (1 - new))


def of_cov(ratios: list[float], *, clipped: bool) -> float:
    """With so few tokens one is chosen: the one that costs most entropy, the only one above 1."""
    logprobs, n = [math.log(r) for r in RATIOS], len(ratios)
    means = sum(logprobs) / n, sum(COV_ADVANTAGES) / n
    covariances = [(x - means[0]) * (a - means[1]) for x, a in zip(logprobs, COV_ADVANTAGES, strict=True)]
    assert sum(1 < c < 5 for c in covariances) == 1
    total = 0.0
    for r, a, c in zip(ratios, COV_ADVANTAGES, covariances, strict=True):
        if clipped:
            total += 0.0 if c == max(covariances) else min(r * a, min(max(r, 0.8), 1.2) * a)
        else:
            total += r * a - (abs(math.log(r)) if c == max(covariances) else 0.0)
    return -total / n


COV_ADVANTAGES = [0.5, -0.5, 2.0, 0.1, -0.5]


@pytest.mark.parametrize(
    ("config", "value", "advantages"),
    [
        (LossConfig(name="dual_clip"), of_dual_clip, ADVANTAGES),
        (LossConfig(name="gmpo", clip_low=0.4, clip_high=0.4), of_gmpo, [1.0] * 5),
        (LossConfig(name="sapo"), of_sapo, ADVANTAGES),
        (
            LossConfig(name="dppo_tv", clip_low=0.1, clip_high=0.15),
            masked_where(lambda a, new, old: abs(new - old) > (0.15 if a > 0 else 0.1)),
            ADVANTAGES,
        ),
        (
            LossConfig(name="dppo_kl", clip_low=0.05, clip_high=0.05),
            masked_where(lambda a, new, old: divergence_of_two(new, old) > 0.05),
            ADVANTAGES,
        ),
        (LossConfig(name="clip_cov"), lambda ratios: of_cov(ratios, clipped=True), COV_ADVANTAGES),
        (LossConfig(name="kl_cov"), lambda ratios: of_cov(ratios, clipped=False), COV_ADVANTAGES),
    ],
    ids=["dual_clip", "gmpo", "sapo", "dppo_tv", "dppo_kl", "clip_cov", "kl_cov"],
)
def test_a_loss_is_its_formula_and_so_is_its_gradient(config: LossConfig, value: Any, advantages: list[float]) -> None:
    loss, _, gradient = evaluate(RATIOS, advantages, config)
    assert loss == pytest.approx(value(RATIOS), rel=1e-5)
    assert gradient == pytest.approx(numerical(value, RATIOS), abs=1e-4)
