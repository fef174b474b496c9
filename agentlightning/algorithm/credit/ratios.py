"""What a token or a rollout weighs, and how far two policies are apart on it: pure functions. Numpy in, numpy out.

Shape letters: U units that are compared with each other (rollouts, or calls), E sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentlightning.types.arrays import Float32Array, Int32Array, np


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
    in Dr.GRPO (arXiv 2503.20783), where the weight of a token depends on no length. `sum`: 1 / units, the sum over each
    unit's tokens, as in REINFORCE over whole sequences (RLOO, arXiv 2402.14740, eq. 2).
    """
    counted = counts_U & (tokens_U > 0)
    weights_U = np.zeros(len(tokens_U), dtype=np.float32)
    if not counted.any():
        return weights_U
    if normalization == "token":
        weights_U[counted] = 1.0 / tokens_U[counted].sum()
    elif normalization == "rollout":
        weights_U[counted] = 1.0 / (counted.sum() * tokens_U[counted])
    elif normalization == "sum":
        weights_U[counted] = 1.0 / counted.sum()
    elif normalization == "constant" and constant:
        weights_U[counted] = 1.0 / (counted.sum() * constant)
    else:
        raise ValueError(f"normalization is 'token', 'rollout', 'sum' or 'constant', not {normalization!r}")
    return weights_U


def filter_weights(plain_E: Float32Array, drawn_E: Float32Array) -> Float32Array:
    """Importance weights for tokens drawn under a filter (a grammar, top_p, top_k): π / μ, at most 1. Constants, [E].

    A token that the filter all but forced says nothing of the policy, and weighs as little as the policy would have
    chosen it. Where nothing was filtered the weight is 1 exactly.
    """
    return np.exp(np.minimum(plain_E - drawn_E, 0.0)).astype(np.float32)


def correction_weights(
    old_E: Float32Array,
    sampled_E: Float32Array,
    sequence_E: Int32Array,
    kind: str,
    cap: float,
    floor: float = 0.0,
    veto: float | None = None,
) -> Float32Array:
    """Importance weights for tokens that other weights (or other numerics) sampled: ρ = π_old / μ. Constants, [E].

    `token`: min(ρ, cap), truncated importance sampling (Espeholt et al., arXiv 1802.01561; Yao et al. 2025);
    `sequence`: the same with ρ of the whole sequence; `mask`: ρ inside [floor, cap] and 0 outside (IcePop, arXiv
    2510.18855); `sequence_mask`: the same with ρ of the whole sequence (masked importance sampling, Liu et al. 2025).
    `veto`: a sequence with a token whose own ρ is below gets 0, whatever its other tokens say (ibid.).
    """
    if kind not in CORRECTIONS:
        raise ValueError(f"There is no correction {kind!r}; choose one of {', '.join(sorted(CORRECTIONS))}")
    gap_E = (old_E - sampled_E).astype(np.float64)
    _, row_E = np.unique(sequence_E, return_inverse=True)
    kept_E = np.ones(len(gap_E)) if veto is None else (np.bincount(row_E, np.exp(gap_E) < veto) == 0)[row_E]
    if kind.startswith("sequence"):
        gap_E = np.bincount(row_E, weights=gap_E)[row_E]
    ratio_E = np.exp(np.clip(gap_E, -30.0, 30.0))
    if kind.endswith("mask"):
        return (kept_E * np.where((ratio_E >= floor) & (ratio_E <= cap), ratio_E, 0.0)).astype(np.float32)
    return (kept_E * np.minimum(ratio_E, cap)).astype(np.float32)


def ratio_range(now_E: np.ndarray, old_E: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest ratio π / π_old of sampled tokens."""
    gaps_E = (now_E - old_E).astype(np.float64)
    return float(np.exp(gaps_E.min())), float(np.exp(gaps_E.max()))


def mean_kl(now_E: np.ndarray, sampled_E: np.ndarray) -> float:
    """KL(engine ‖ learner) of sampled tokens, in nats per token: k3's estimate (Schulman 2020), never below 0."""
    gaps_E = (now_E - sampled_E).astype(np.float64)
    return float(np.mean(np.expm1(gaps_E) - gaps_E))


def mean_gap(gaps: Sequence[Float32Array]) -> float:
    """The mean over passes of log π − log π_other of sampled tokens: k1's estimate of KL(π ‖ other), in nats."""
    return float(np.concatenate(gaps).mean())


CORRECTIONS = ("mask", "sequence", "sequence_mask", "token")


def correction_measures(weights_E: Float32Array) -> dict[str, float]:
    """What the importance weights of a step's tokens are like.

    The effective sample size is (Σw)² / (n Σw²): 1 where all are equal, 1/n where one token has all the weight (Kish,
    Survey Sampling, 1965).
    """
    total, squares = float(weights_E.sum()), float((weights_E**2).sum())
    return {
        "correction_mean": total / len(weights_E),
        "corrected_to_zero": float((weights_E == 0).mean()),
        "effective_sample_size": total**2 / (len(weights_E) * squares) if squares else 0.0,
    }
