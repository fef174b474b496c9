"""GDPO: each named part of a reward is compared by itself (Liu et al., arXiv 2601.05242).

    A_k = (r_k − mean) / std of the part k among siblings,   A = Σ w_k A_k,   advantage = A / std of A over the step

With a weighted sum a part of small spread is drowned by one of large spread, and rollouts that are good in different
parts look alike. Here every part has the influence that its weight in `reward_weights` says. What was given without
a weighted part (a plain number, a penalty for length) is one more part, of weight 1. A part that a rollout lacks counts
as 0, as in the weighted sum. The mean of A over the step is 0 already, so groups that teach nothing stay at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.modes import Worth
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.returns import STD_FLOOR
from agentlightning.algorithm.units import CreditRule
from agentlightning.algorithm.verdicts import absent_part
from agentlightning.errors import ConfigError
from agentlightning.types.arrays import np

if TYPE_CHECKING:
    from agentlightning.algorithm.asynchronous import Sampled
    from agentlightning.algorithm.settings import TrainingSettings


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Rollouts as if one part of their rewards were all of it."""

    episodes: Sequence[Episode]
    rule: CreditRule
    part: str | None = None
    """None: the whole reward, or what was given without a weighted part."""
    weight: float = 1.0


def by_part(episodes: Sequence[Episode], rule: CreditRule) -> list[Seen]:
    """The rollouts by each part that has a weight, and by what was given without one."""
    rest = Seen([_rest(e, {*rule.weights, *rule.constrained}) for e in episodes], rule)
    return [rest, *(_seen(episodes, rule, name, weight) for name, weight in rule.weights.items() if weight)]


def looked_at(episodes: Sequence[Episode], rule: CreditRule) -> list[Seen]:
    """In what siblings may differ: what they earned, or with a decoupled advantage any of its parts; and whatever has a
    constraint."""
    earned = by_part(episodes, rule) if rule.estimator.decoupled else [Seen(episodes, rule)]
    return [*earned, *(_seen(episodes, rule, name) for name in rule.constrained)]


def _seen(episodes: Sequence[Episode], rule: CreditRule, part: str, weight: float = 1.0) -> Seen:
    return Seen([of_part(e, part) for e in episodes], replace(rule, overlong=None), part, weight)


def of_part(episode: Episode, name: str) -> Episode:
    """The rollout as if this part were all that it earned."""
    if not episode.rewards:
        return replace(episode, reward=None if episode.reward is None else 0.0)
    return episode.with_rewards([replace(r, value=r.parts.get(name, 0.0)) for r in episode.rewards])


def _rest(episode: Episode, named: Set[str]) -> Episode:
    rewards = [replace(r, value=0.0) if named & r.parts.keys() else r for r in episode.rewards]
    return episode.with_rewards(rewards) if rewards else episode


def added(found: Sequence[tuple[float, Sequence[Sequence[Worth]]]], counts: Sequence[bool]) -> list[list[Worth]]:
    """The advantages by part, each with its weight, added up and divided by their deviation over the units that count;
    each unit weighs the same, however many calls it has."""
    sums = [np.zeros(len(turns)) for turns in found[0][1]]
    for weight, advantages in found:
        sums = [s + weight * np.array(turns, np.float64) for s, turns in zip(sums, advantages, strict=True)]
    squares = [float(np.mean(s**2)) for s, counted in zip(sums, counts, strict=True) if counted and len(s)]
    deviation = float(np.sqrt(np.mean(squares))) if squares else 0.0
    scale = 1.0 / deviation if deviation > STD_FLOOR else 0.0
    return [[*(s * scale).tolist()] for s in sums]


@dataclass(frozen=True, kw_only=True)
class Decoupled(Part):
    """Present where each part of a reward is compared by itself."""

    names: Sequence[str]

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return cls(names=tuple(settings.reward_weights)) if settings.estimator.decoupled else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        s = settings
        if not s.estimator.decoupled:
            return
        if not s.credit_mode.compares or s.is_supervised:
            raise ConfigError(f"advantage={s.advantage!r} compares siblings, and credit={s.credit!r} does not.")
        if not any(s.reward_weights.values()):
            raise ConfigError(
                f"advantage={s.advantage!r} compares each named part of a reward by itself and adds them up by weight: "
                "name them, for example reward_weights={'correct': 1.0, 'format': 0.5}."
            )
        if s.kl.coef and s.kl.where == "reward":
            raise ConfigError(
                f"advantage={s.advantage!r} divides what a rollout earned by its deviation, so that kl_coef would mean "
                "nothing in the reward. Take kl_in='loss'."
            )

    def in_run(self, run: RunScope) -> RunHooks:
        return _Naming(self.names, run)


class _Naming(RunHooks):
    """Says which of the parts nobody gives."""

    def __init__(self, names: Sequence[str], run: RunScope) -> None:
        self._names = names
        self._reporter = run.context.reporter
        self._done = False

    def measure(self, sampled: Sampled) -> Mapping[str, Any]:
        found = {name for e in sampled.episodes for r in e.rewards for name in r.parts}
        missing = [name for name in self._names if name not in found]
        if missing and any(e.rewards for e in sampled.episodes) and not self._done:
            self._reporter.warn(absent_part(missing[0], " of reward_weights, so it teaches nothing", found))
            self._done = True
        return {}
