"""Advantages, how much better a return was than others, and returns over the turns of a rollout. Pure functions, each
with what it needs; numpy in, numpy out.

An advantage of one's own is such a function, given as it is (`GRPO(advantage=mine)`), or made an `Estimator` where it
needs something else than siblings to compare with. Nothing else knows an estimator by its name.

Shape letters: U units that are compared with each other (rollouts, or calls), T turns of one rollout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentlightning.arguments import can_be, explained, explained_class
from agentlightning.errors import ConfigError
from agentlightning.types.arrays import Array, Float32Array, Int32Array, np

Compute = Callable[[Float32Array, Int32Array, Array], Float32Array]
"""(returns_U, groups_U, counts_U) → advantages_U.

Units of one group carry the same number in `groups_U`. A unit with `counts_U` False is masked: it gets 0 and must play
no part in anybody else's advantage."""


@explained_class
@dataclass(frozen=True, slots=True)
class Estimator:
    """An advantage and what it needs; called like its function."""

    compute: Compute
    siblings: bool = True
    """It compares the rollouts of a task with each other: a group of one, or one of equals, teaches nothing."""
    selects: bool = False
    """It chooses what is learned as it is, whichever weights sampled it; a unit that gets 0 is no part of the data."""
    pairs: bool = False
    """It makes one pair of each group, +1 and −1, for a loss of preferences."""
    whitens: bool = False
    """What it gives is whitened afterwards: mean 0 and standard deviation 1 over the sampled tokens of the step."""
    least: int = 2
    """How many siblings it needs, where it compares them."""
    from_zero: bool = False
    """It divides by the mean of the rewards, so none may be below 0."""
    decoupled: bool = False
    """Each named part of a reward is compared by itself. The results are added up by `reward_weights`, and divided by
    their deviation over the step."""

    @property
    def name(self) -> str:
        """The qualified name of the function, for messages and the run's file."""
        return getattr(self.compute, "__qualname__", type(self.compute).__qualname__)

    def __repr__(self) -> str:
        return self.name

    def __call__(self, returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
        """The advantages; masked units get 0. Raises ConfigError when the function gives something else."""
        found_U = np.asarray(self.compute(returns_U, groups_U, counts_U), dtype=np.float32)
        if found_U.shape != returns_U.shape or not np.isfinite(found_U).all():
            raise ConfigError(
                f"The advantage {self.name} must give one finite number for each of {len(returns_U)} returns; it gave "
                f"{'numbers that are not finite' if found_U.shape == returns_U.shape else f'shape {found_U.shape}'}."
            )
        return np.where(counts_U, found_U, np.float32(0))


@explained
def estimator(
    *,
    siblings: bool = True,
    selects: bool = False,
    pairs: bool = False,
    whitens: bool = False,
    from_zero: bool = False,
    decoupled: bool = False,
) -> Callable[[Compute], Estimator]:
    """Decorator: makes an `Estimator` of a function. See there for what can be needed."""
    return lambda compute: Estimator(
        compute, siblings, selects, pairs, whitens, from_zero=from_zero, decoupled=decoupled
    )


@estimator()
def grpo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """(r − mean) / std within a group: GRPO (Shao et al., arXiv 2402.03300, section 4.1.2)."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r - r.mean()) / r.std())


@estimator(decoupled=True)
def gdpo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """(r − mean) / std of each part of a reward within a group: GDPO (Liu et al., arXiv 2601.05242; `parts.gdpo`)."""
    return grpo(returns_U, groups_U, counts_U)


@estimator()
def drgrpo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """r − mean within a group: Dr.GRPO (Liu et al., arXiv 2503.20783, section 3.2)."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: r - r.mean())


@estimator()
def rloo(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """r − mean of the others in the group: RLOO (Ahmadian et al., arXiv 2402.14740, eq. 8)."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r - r.mean()) * len(r) / (len(r) - 1))


@estimator(siblings=False)
def reinforce(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """The return itself, without a baseline (Williams 1992)."""
    return np.where(counts_U, returns_U, 0).astype(np.float32)


@estimator(siblings=False, whitens=True)
def reinforce_pp(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """The return, whitened over the tokens of the step: REINFORCE++ (Hu et al., arXiv 2501.03262)."""
    return reinforce(returns_U, groups_U, counts_U)


@estimator(whitens=True)
def reinforce_pp_baseline(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """r − mean of the group, whitened over the tokens of the step: REINFORCE++ baseline (arXiv 2501.03262)."""
    return drgrpo(returns_U, groups_U, counts_U)


@estimator(from_zero=True)
def maxrl(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """(r − mean) / mean within a group: MaxRL (Tajwar et al., arXiv 2602.02710).

    For rewards of 0 and 1. With N siblings its gradient is that of Σ pass@k / k for k < N, which becomes log p for
    many: a task is worth the more the rarer it succeeds.
    """
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r - r.mean()) / max(r.mean(), STD_FLOOR))


def pass_at(k: int) -> Estimator:
    """What a rollout adds to the best of k: PKPO (Walder & Karkhanis, arXiv 2505.15201, s^(loo − 1)), times siblings.

    n / C(n, k) · Σ over all k siblings I with i among them of max over I − max over I without i, so that the gradient
    is that of the best reward of k rollouts, pass@k where rewards are 0 and 1. Rollouts that are never best get 0.
    """

    def added(r: np.ndarray) -> np.ndarray:
        n, taken, order = len(r), min(k, len(r)), np.argsort(r, kind="stable")
        found = np.zeros(n)
        below = 0.0  # Σ over lower ones of what they are the best of, without i
        for rank, i in enumerate(order):
            found[i] = r[i] * math.comb(rank, taken - 1) - below
            below += r[i] * math.comb(rank, taken - 2)
        return found * n / math.comb(n, taken)

    def compute(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
        return _per_group(returns_U, groups_U, counts_U, added)

    if k < 2:
        raise ConfigError(f"pass_at({k}): the best of one rollout is its reward; take k of at least 2.")
    compute.__qualname__ = f"pass_at({k})"
    return Estimator(compute, least=k)


@estimator(siblings=False, selects=True)
def everything(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """1 for all: supervised learning."""
    return counts_U.astype(np.float32)


@estimator(selects=True)
def best(returns_U: Float32Array, groups_U: Int32Array, counts_U: np.ndarray) -> Float32Array:
    """1 for the best of each group where siblings differ, else 0: rejection sampling for fine-tuning."""
    return _per_group(returns_U, groups_U, counts_U, lambda r: (r == r.max()).astype(np.float64))


@estimator(selects=True, pairs=True)
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
    "gdpo": gdpo,
    "grpo": grpo,
    "maxrl": maxrl,
    "pass@2": pass_at(2),
    "pass@4": pass_at(4),
    "pass@8": pass_at(8),
    "reinforce": reinforce,
    "reinforce++": reinforce_pp,
    "reinforce++baseline": reinforce_pp_baseline,
    "rloo": rloo,
}


def as_estimator(given: str | Compute | Estimator) -> Estimator:
    """Makes an estimator from a name in the table, a function or an estimator. Raises ConfigError otherwise."""
    if isinstance(given, Estimator):
        return given
    if isinstance(given, str):
        if given in ADVANTAGES:
            return ADVANTAGES[given]
        raise ConfigError(f"advantage is {given!r}; {can_be(given, ADVANTAGES, 'a function')}")
    try:
        inspect.signature(given).bind(None, None, None)
    except (TypeError, ValueError):
        raise ConfigError(
            f"advantage is {given!r}; a function takes (returns_U, groups_U, counts_U) and gives advantages_U."
        ) from None
    return Estimator(given)


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


STD_FLOOR = 1e-6
"""Values that differ by less are equal."""


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
    values: Sequence[Sequence[float]], groups_U: Int32Array, counts_U: np.ndarray, compare: Compute
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
