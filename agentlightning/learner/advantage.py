"""Advantages: pure functions of returns. Numpy in, numpy out.

Shape letters: R rollouts of a step.
"""

from __future__ import annotations

import numpy as np

from agentlightning.types.call import Float32Array, Int32Array

STD_FLOOR = 1e-6


def group_advantages(
    returns_R: Float32Array, groups_R: Int32Array, counts_R: np.ndarray, *, normalize_std: bool = True
) -> Float32Array:
    """GRPO's group-relative advantage (Shao et al., arXiv 2402.03300, section 4.1.2): (r − mean) / std within a group.

    Without `normalize_std` it is Dr.GRPO's r − mean (Liu et al., arXiv 2503.20783). Rollouts with `counts_R` False are
    masked: they get 0 and play no part in their siblings' mean and std. A group whose returns are all equal gets 0.
    """
    advantages_R = np.zeros(len(returns_R), dtype=np.float32)
    for group in np.unique(groups_R):
        members = (groups_R == group) & counts_R
        if members.sum() < 2:
            continue
        returns = returns_R[members].astype(np.float64)
        centred = returns - returns.mean()
        spread = returns.std()
        if spread <= STD_FLOOR:
            continue
        advantages_R[members] = centred / spread if normalize_std else centred
    return advantages_R


def entry_weights(tokens_R: Int32Array, counts_R: np.ndarray, normalization: str) -> Float32Array:
    """Weight of each sampled token of a rollout in the loss, by rollout.

    `token`: every token counts the same, as in DAPO (arXiv 2503.14476, eq. 8); `rollout`: every rollout counts the
    same, as in GRPO (arXiv 2402.03300, eq. 3). The weights of all tokens add up to 1.
    """
    counted = counts_R & (tokens_R > 0)
    weights_R = np.zeros(len(tokens_R), dtype=np.float32)
    if not counted.any():
        return weights_R
    if normalization == "token":
        weights_R[counted] = 1.0 / tokens_R[counted].sum()
    elif normalization == "rollout":
        weights_R[counted] = 1.0 / (counted.sum() * tokens_R[counted])
    else:
        raise ValueError(f"normalization is 'token' or 'rollout', not {normalization!r}")
    return weights_R
