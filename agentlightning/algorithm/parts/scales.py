"""Rewards of several data sets on one scale: each is divided by the deviation that its data set's rewards have had.

    μ ← κ μ + (1 − κ) mean of the step,   ν ← κ ν + (1 − κ) mean of squares,   σ = √(ν − μ²)

the moments of PopArt's scale-invariant updates (Hessel et al., arXiv 1809.04474, eq. 7), by the name of a `Mixture`'s
data set. Only the scale changes, not where 0 is: what a rollout is compared with is the advantage's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean
from typing import Self

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.settings import TrainingSettings

KEPT = 0.9
SMALLEST = 1e-3
"""Of the deviations: a data set whose rewards have never differed is not blown up."""


class RewardScales:
    """Two moments by data set; `values` is the whole state."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def load(self, values: Mapping[str, Sequence[float]]) -> None:
        self.values = {name: list(moments) for name, moments in values.items()}

    def scaled(self, episodes: Sequence[Episode]) -> list[Episode]:
        """The step's rollouts with their rewards divided, after their data sets' moments have taken the step in."""
        earned: dict[str, list[float]] = {}
        for e in episodes:
            if e.good and e.reward is not None and not e.replayed:
                earned.setdefault(_source(e), []).append(e.reward)
        for name, rewards in earned.items():
            now = fmean(rewards), fmean(r * r for r in rewards)
            before = self.values.get(name, now)
            self.values[name] = [KEPT * b + (1 - KEPT) * n for b, n in zip(before, now, strict=True)]
        return [_divided(e, self.deviation(_source(e))) for e in episodes]

    def deviation(self, name: str) -> float:
        """1 for a data set that nothing is known of, or whose rewards have never differed."""
        mean, square = self.values.get(name, (0.0, 1.0))
        found = sqrt(max(square - mean * mean, 0.0))
        return found if found > SMALLEST else 1.0


def _source(episode: Episode) -> str:
    return str(episode.rollout.metadata.get("source", ""))


def _divided(episode: Episode, by: float) -> Episode:
    rewards = [replace(r, value=r.value / by) for r in episode.rewards]
    return replace(episode, reward=None if episode.reward is None else episode.reward / by, rewards=rewards)


@dataclass(frozen=True, kw_only=True)
class Scales(Part):
    """Present where rewards are scaled by their data set."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return cls() if settings.reward_scale == "source" else None

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _Scaling()


class _Scaling(PolicyHooks):
    def __init__(self) -> None:
        self._scales = RewardScales()

    async def load(self, state: Mapping[str, Sequence[float]]) -> None:
        self._scales.load(state)

    def state(self) -> dict[str, list[float]]:
        return self._scales.values

    async def before_credit(self, update: Update) -> None:
        update.episodes = self._scales.scaled(update.episodes)
