"""Returns over the turns of a rollout, and comparing them: pure functions. Numpy in, numpy out.

Shape letters: U units that are compared with each other (rollouts, or calls), T turns of one rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentlightning.types.arrays import Array, Float32Array, Int32Array, np

STD_FLOOR = 1e-6
"""Values that differ by less are equal."""

Compare = Callable[[Float32Array, Int32Array, Array], Float32Array]
"""(returns_U, groups_U, counts_U) → advantages_U."""


def whitened(values_U: np.ndarray, counts_U: np.ndarray) -> Float32Array:
    whitened_U = np.zeros(len(values_U), dtype=np.float32)
    counted = values_U[counts_U]
    if len(counted) >= 2 and counted.std() > STD_FLOOR:
        whitened_U[counts_U] = (counted - counted.mean()) / counted.std()
    return whitened_U


def whiten(values: Sequence[Sequence[float]], counts_U: np.ndarray) -> list[list[float]]:
    """Values of several turns per unit with mean 0 and std 1 over all counted turns; masked units get 0."""
    flat = np.array([v for unit in values for v in unit], dtype=np.float64)
    counted = np.repeat(counts_U, [len(unit) for unit in values])
    found = iter(whitened(flat, counted).tolist())
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
    values: Sequence[Sequence[float]], groups_U: Int32Array, counts_U: np.ndarray, compare: Compare
) -> list[list[float]]:
    """Compare the units turn by turn: the t-th value of each with the t-th of the others.

    A unit that ended earlier stands with its last value, so every unit counts once in every comparison however long it
    is; where all values of each unit are equal the result is that of `compare` on one value per unit, bit for bit.
    """
    width = max((len(v) for v in values), default=0)
    result: list[list[float]] = [[] for _ in values]
    for t in range(width):
        column = np.array([v[min(t, len(v) - 1)] if v else 0.0 for v in values], dtype=np.float32)
        advantages = compare(column, groups_U, counts_U & np.array([bool(v) for v in values]))
        for unit, v in enumerate(values):
            if t < len(v):
                result[unit].append(float(advantages[unit]))
    return result
