"""Constraints: a part of the reward that shall stay within a bound, whatever else is earned.

    reward − λ · part,   λ ← min(max(λ + rate · (mean of the part − bound), 0), ceiling)   after each step

The multiplier rises while the bound is broken and falls to 0 while it is kept: projected gradient ascent on the dual
(Ray et al., "Benchmarking Safe Exploration in Deep Reinforcement Learning", 2019, Lagrangian methods; Tessler et al.,
arXiv 1805.11074, eq. 8). It is the integral term of a controller, so it answers late and may swing around the bound
(Stooke et al., arXiv 2007.03964); a smaller `rate` swings less. With `at_least` the signs are turned.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from agentlightning.algorithm.episode import Episode, reward_parts
from agentlightning.algorithm.part import (
    Part,
    PolicyHooks,
    PolicyScope,
    RunRecord,
    Update,
    Updated,
    refuse_below_zero,
)
from agentlightning.algorithm.records import ByName, value_of
from agentlightning.algorithm.rollout_verdicts import absent_part
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError
from agentlightning.metrics.catalogue import STABLE, Metric
from agentlightning.types.finding import Finding, problem

LOOKED_AT = 8
"""The last steps, by which it is said whether a constraint is met …"""
T_95 = 2.36
"""… and the 0.975 quantile of Student's t for so many: by how many standard errors they must be beyond the bound."""


@explained_class
@dataclass(frozen=True)
class Constraint(ByName):
    """A bound on the mean of a part of the reward: `GRPO(constraint=agl.Constraint("cost", at_most=0.02))`."""

    part: str
    """The part, by the name that the agent gives it in its reward."""
    at_most: float | None = None
    """Its mean over a step's rollouts shall not be above this …"""
    at_least: float | None = None
    """… or not below this."""
    rate: float = 0.1
    """How much the multiplier rises in a step for each unit that the mean is beyond the bound."""
    ceiling: float = 10.0
    """The multiplier goes no higher."""

    def __post_init__(self) -> None:
        if not isinstance(self.part, str) or not self.part:
            raise ConfigError(f"part of a Constraint is {self.part!r}; give the name of a part of the reward.")
        for name in ("at_most", "at_least", "rate", "ceiling"):
            value = getattr(self, name)
            bound = name.startswith("at_")
            if bound and value is None:
                continue
            number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
            if not math.isfinite(number) or not (bound or number > 0):
                must = "a number" if bound else "a number above 0"
                raise ConfigError(f"{name} of a Constraint is {value!r}; it must be {must}.")
        if (self.at_most is None) == (self.at_least is None):
            raise ConfigError(f"Give the constraint on {self.part!r} one bound: at_most=… or at_least=….")

    @property
    def sign(self) -> float:
        """1 where less of the part is better, −1 where more is."""
        return 1.0 if self.at_least is None else -1.0

    def excess(self, mean: float) -> float:
        """How far a mean is beyond the bound; below 0 within it."""
        bound = self.at_most if self.at_least is None else self.at_least
        assert bound is not None
        return self.sign * (mean - bound)

    def __str__(self) -> str:
        return f"{self.part} ≤ {self.at_most:g}" if self.at_most is not None else f"{self.part} ≥ {self.at_least:g}"


def as_constraints(given: Any) -> tuple[Constraint, ...]:
    """The constraints that a setting means: none, one, or several, each an object or its settings by name."""
    several = [] if given is None else [*given] if isinstance(given, list | tuple) else [given]
    found = tuple(Constraint.read(one, "constraint") for one in several)
    names = [one.part for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"constraint has two bounds on {twice[0]!r}; give each part one.")
    return found


def recorded_constraints(settings: Mapping[str, Any]) -> tuple[Constraint, ...]:
    """The constraints of a recorded run; none where they cannot be read."""
    with suppress(ConfigError):
        return as_constraints(settings.get("constraint"))
    return ()


def verdict(constraint: Constraint, means: Sequence[float], multiplier: float | None) -> Finding | None:
    """Whether a constraint is broken at the end; the part's mean in each step, and its last multiplier."""
    late = [constraint.excess(mean) for mean in means[-LOOKED_AT:]]
    if len(late) < LOOKED_AT or statistics.mean(late) <= T_95 * statistics.stdev(late) / math.sqrt(len(late)):
        return None
    mean = statistics.mean(means[-LOOKED_AT:])
    if multiplier is not None and multiplier >= constraint.ceiling:
        state = f"and its multiplier is at its ceiling of {constraint.ceiling:g}"
        fix = "The agent may be unable to keep it: ask for less, show that it can be kept, or raise `ceiling`."
    else:
        state = "and its multiplier is " + ("not recorded" if multiplier is None else f"{multiplier:.3g}")
        fix = "Give the run more steps, or the constraint a higher `rate`."
    words = f"The constraint {constraint} is not met: the mean of the last {LOOKED_AT} steps is {mean:.3g}, {state}."
    return problem("constraint_not_met", words, fix, part=constraint.part, mean=mean, multiplier=multiplier)


@dataclass(frozen=True, kw_only=True)
class Constraints(Part):
    """Present where parts of the reward have bounds."""

    metrics = (
        Metric(
            "constraint/…",
            "Multiplier of …",
            STABLE,
            "",
            "The Lagrange multiplier of the constraint on this part of the reward, as used in the step;"
            " 0: the bound is kept.",
        ),
    )

    name: ClassVar[str] = "constraint"
    of_parts: Sequence[Constraint]

    @classmethod
    def parts_in(cls, settings: TrainingSettings) -> tuple[str, ...]:
        """The parts of rewards that have a bound in these settings."""
        return tuple(one.part for one in as_constraints(value_of(settings, "constraint")))

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        found = as_constraints(value_of(settings, "constraint"))
        return cls(of_parts=found) if found else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        found = as_constraints(value_of(settings, "constraint"))
        if found and (settings.is_supervised or settings.credit_mode.teacher):
            raise ConfigError(
                "constraint has no effect here: it needs an algorithm that learns from rewards. SFT and DPO choose "
                "what is good, and a teacher gives none. Leave it out."
            )
        refuse_below_zero(settings, "a constraint", "constraint", given=bool(found))
        if watched := [one.part for one in found if one.part in settings.watched_parts]:
            raise ConfigError(f"{watched[0]!r} is in watched_parts, which train nothing, and has a constraint.")

    @classmethod
    def findings(cls, record: RunRecord) -> Iterator[Finding]:
        for one in recorded_constraints(record.settings):
            means = [row[f"reward/{one.part}"] for row in record.steps if f"reward/{one.part}" in row]
            key = f"constraint/{one.part}"
            last = [v for k, v in (record.steps[-1] if record.steps else {}).items() if k.endswith(key)]
            found = verdict(one, means, max(last, default=None))
            if found is not None:
                yield found

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _Multipliers(self.of_parts, policy)


class _Multipliers(PolicyHooks):
    def __init__(self, constraints: Sequence[Constraint], policy: PolicyScope) -> None:
        self._constraints = constraints
        self._reporter = policy.reporter
        self._values = {one.part: 0.0 for one in constraints}
        self._known: set[str] = set()
        """Parts that were seen, or said to be missing."""

    async def load(self, state: Mapping[str, float]) -> None:
        self._values |= {part: value for part, value in state.items() if part in self._values}

    def state(self) -> dict[str, float]:
        return self._values

    async def before_credit(self, update: Update) -> None:
        prices = {one.part: one.sign * self._values[one.part] for one in self._constraints}
        if update.rule.estimator.decoupled:
            weights = update.rule.weights
            weights = {**weights, **{part: weights.get(part, 0.0) - price for part, price in prices.items()}}
            update.rule = replace(update.rule, weights=weights)
        elif any(prices.values()):
            update.episodes = [_priced(e, prices) for e in update.episodes]

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        fresh = [e for e in update.episodes if not e.replayed and update.rule.uses[e.outcome] == "train"]
        means = reward_parts(fresh)
        for one in self._constraints:
            value = self._values[one.part]
            update.metrics[f"constraint/{one.part}"] = value
            if one.part in means:
                self._known.add(one.part)
                risen = value + one.rate * one.excess(means[one.part])
                self._values[one.part] = min(max(risen, 0.0), one.ceiling)
            elif fresh:
                self._say_missing(one.part, sorted(means))

    def _say_missing(self, part: str, parts: Sequence[str]) -> None:
        if part not in self._known:
            self._known.add(part)
            self._reporter.warn(absent_part(part, ", which has a constraint", parts))


def _priced(episode: Episode, prices: Mapping[str, float]) -> Episode:
    """What the rollout earned, less the price of its parts."""
    costs = [sum(price * r.parts.get(part, 0.0) for part, price in prices.items()) for r in episode.rewards]
    if not any(costs):
        return episode
    rewards = [replace(r, value=r.value - cost) for r, cost in zip(episode.rewards, costs, strict=True)]
    return episode.with_rewards(rewards)
