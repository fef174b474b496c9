"""Advantages, returns and weights: pure functions. Numpy in, numpy out.

Shape letters: U units that are compared with each other (rollouts, or calls), T turns of one rollout, E sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from agentlightning.types.call import Float32Array, Int32Array

STD_FLOOR = 1e-6

Estimator = Callable[[Float32Array, Int32Array, np.ndarray], Float32Array]
"""(returns_U, groups_U, counts_U) → advantages_U.

A unit with `counts_U` False is masked: it gets 0 and plays no part in anybody else's advantage."""


def grpo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """(r − mean) / std within a group: GRPO (Shao et al., arXiv 2402.03300, section 4.1.2)."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r - r.mean()) / r.std())


def drgrpo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """r − mean within a group: Dr.GRPO (Liu et al., arXiv 2503.20783, section 3.2)."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: r - r.mean())


def rloo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """r − mean of the others in the group: RLOO (Ahmadian et al., arXiv 2402.14740, eq. 8)."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


def reinforce(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """The return itself, without a baseline (Williams 1992)."""
    return np.where(counts_U, returns_U, 0).astype(np.float32)


def reinforce_pp(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """(r − mean) / std over the whole step: REINFORCE++ (Hu et al., arXiv 2501.03262)."""
    return _whitened(returns_U.astype(np.float64), counts_U)


def reinforce_pp_baseline(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """r − mean of the group, then divided by the std of the whole step: REINFORCE++ baseline (arXiv 2501.03262)."""
    centred_U = drgrpo(returns_U, groups_U, counts_U).astype(np.float64)
    counted = centred_U[counts_U]
    spread = counted.std() if len(counted) else 0.0
    return (centred_U / spread if spread > STD_FLOOR else np.zeros_like(centred_U)).astype(np.float32)


def everything(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """1 for all: supervised learning."""
    return counts_U.astype(np.float32)


def best(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """1 for the best of each group where siblings differ, else 0: rejection sampling for fine-tuning."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r == r.max()).astype(np.float64))


def best_and_worst(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """+1 for the first of the best and −1 for the first of the worst of each group, else 0: a pair for DPO."""

    def pair(r: np.ndarray) -> np.ndarray:
        signs = np.zeros_like(r)
        signs[r.argmax()], signs[r.argmin()] = 1.0, -1.0
        return signs

    return _per_group(returns_U, groups_U, counts_U, pair)


ADVANTAGES: dict[str, Estimator] = {
    "all": everything,
    "best": best,
    "best_and_worst": best_and_worst,
    "drgrpo": drgrpo,
    "grpo": grpo,
    "reinforce": reinforce,
    "reinforce++": reinforce_pp,
    "reinforce++baseline": reinforce_pp_baseline,
    "rloo": rloo,
}

ALONE = ("all", "reinforce", "reinforce++")
"""These need no siblings."""

SELECTING = ("best", "best_and_worst")
"""These choose rollouts to learn; the others are no part of the data, so they count in no mean."""


def _per_group(
    returns_U: Float32Array,
    groups_U: Int32Array,
    counts_U: np.ndarray,
    estimate: Callable[[np.ndarray], np.ndarray],
) -> Float32Array:
    """Groups of fewer than two, and those whose returns are all equal, have nothing to say and get 0."""
    advantages_U = np.zeros(len(returns_U), dtype=np.float32)
    for group in np.unique(groups_U):
        members = (groups_U == group) & counts_U
        returns = returns_U[members].astype(np.float64)
        if len(returns) >= 2 and returns.std() > STD_FLOOR:
            advantages_U[members] = estimate(returns)
    return advantages_U


def _whitened(values_U: np.ndarray, counts_U: np.ndarray) -> Float32Array:
    whitened_U = np.zeros(len(values_U), dtype=np.float32)
    counted = values_U[counts_U]
    if len(counted) >= 2 and counted.std() > STD_FLOOR:
        whitened_U[counts_U] = (counted - counted.mean()) / counted.std()
    return whitened_U


def whiten(values: Sequence[Sequence[float]], counts_U: np.ndarray) -> list[list[float]]:
    """Values of several turns per unit with mean 0 and std 1 over all counted turns; masked units get 0."""
    flat = np.array([v for unit in values for v in unit], dtype=np.float64)
    counted = np.repeat(counts_U, [len(unit) for unit in values])
    found = iter(_whitened(flat, counted).tolist())
    return [[next(found) for _ in unit] for unit in values]


def return_to_go(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """G_t = r_t + γ G_{t+1}, the discounted sum of what is still to come."""
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards_T):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]


def gae(
    rewards_T: Sequence[float], values_T: Sequence[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Generalised advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16) and the critic's targets A + V.

    The episode ends after the last turn: nothing is expected of what follows it.
    """
    advantages: list[float] = []
    following, next_value = 0.0, 0.0
    for reward, value in zip(reversed(rewards_T), reversed(values_T), strict=True):
        following = reward + gamma * next_value - value + gamma * lam * following
        advantages.append(following)
        next_value = value
    advantages.reverse()
    return advantages, [a + v for a, v in zip(advantages, values_T, strict=True)]


def by_position(
    values: Sequence[Sequence[float]], groups_U: Int32Array, counts_U: np.ndarray, estimator: Estimator
) -> list[list[float]]:
    """Compare the units turn by turn: the t-th value of each with the t-th of the others.

    A unit that ended earlier stands with its last value, so every unit counts once in every comparison however long it
    is; where all values of each unit are equal the result is the estimator's on one value per unit, bit for bit.
    """
    width = max((len(v) for v in values), default=0)
    result: list[list[float]] = [[] for _ in values]
    for t in range(width):
        column = np.array([v[min(t, len(v) - 1)] if v else 0.0 for v in values], dtype=np.float32)
        advantages = estimator(column, groups_U, counts_U & np.array([bool(v) for v in values]))
        for unit, v in enumerate(values):
            if t < len(v):
                result[unit].append(float(advantages[unit]))
    return result


def overlong_penalty(tokens_U: Int32Array, limit: int, margin: int) -> Float32Array:
    """Soft punishment of long rollouts (DAPO, arXiv 2503.14476, eq. 13): 0 up to limit − margin, −1 from limit on."""
    over_U = tokens_U - (limit - margin)
    return -np.clip(over_U / margin if margin else over_U >= 0, 0.0, 1.0).astype(np.float32)


def entry_weights(
    tokens_U: Int32Array, counts_U: np.ndarray, normalization: str, constant: float | None = None
) -> Float32Array:
    """Weight of each sampled token of a unit in the loss, by unit.

    `token`: every token counts the same, as in DAPO (arXiv 2503.14476, eq. 8); `rollout`: every unit counts the same,
    as in GRPO (arXiv 2402.03300, eq. 3). The weights of all tokens add up to 1. `constant`: 1 / (units × constant), as
    in Dr.GRPO (arXiv 2503.20783), where the weight of a token depends on no length.
    """
    counted = counts_U & (tokens_U > 0)
    weights_U = np.zeros(len(tokens_U), dtype=np.float32)
    if not counted.any():
        return weights_U
    if normalization == "token":
        weights_U[counted] = 1.0 / tokens_U[counted].sum()
    elif normalization == "rollout":
        weights_U[counted] = 1.0 / (counted.sum() * tokens_U[counted])
    elif normalization == "constant" and constant:
        weights_U[counted] = 1.0 / (counted.sum() * constant)
    else:
        raise ValueError(f"normalization is 'token', 'rollout' or 'constant' (with a constant), not {normalization!r}")
    return weights_U


def filter_weights(plain_E: Float32Array, drawn_E: Float32Array) -> Float32Array:
    """Importance weights for tokens drawn under a filter (a grammar, top_p, top_k): π / μ, at most 1. Constants, [E].

    A token that the filter all but forced says nothing of the policy, and weighs as little as the policy would have
    chosen it. Where nothing was filtered the weight is 1 exactly.
    """
    return np.exp(np.minimum(plain_E - drawn_E, 0.0)).astype(np.float32)


def correction_weights(
    old_E: Float32Array, sampled_E: Float32Array, sequence_E: Int32Array, kind: str, cap: float, floor: float = 0.0
) -> Float32Array:
    """Importance weights for tokens that other weights (or other numerics) sampled: ρ = π_old / μ. Constants, [E].

    `token`: min(ρ, cap), truncated importance sampling (Espeholt et al., arXiv 1802.01561; Yao et al. 2025);
    `sequence`: the same with ρ of the whole sequence; `mask`: ρ inside [floor, cap] and 0 outside (IcePop, arXiv
    2510.18855); `sequence_mask`: the same with ρ of the whole sequence (masked importance sampling, Liu et al. 2025).
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"There is no correction {kind!r}; choose one of {', '.join(sorted(CORRECTIONS))}")
    gap_E = (old_E - sampled_E).astype(np.float64)
    if kind.startswith("sequence"):
        _, row_E = np.unique(sequence_E, return_inverse=True)
        gap_E = np.bincount(row_E, weights=gap_E)[row_E]
    ratio_E = np.exp(np.clip(gap_E, -30.0, 30.0))
    if kind.endswith("mask"):
        return np.where((ratio_E >= floor) & (ratio_E <= cap), ratio_E, 0.0).astype(np.float32)
    return np.minimum(ratio_E, cap).astype(np.float32)


CORRECTIONS = ("mask", "sequence", "sequence_mask", "token")
