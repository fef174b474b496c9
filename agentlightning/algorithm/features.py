"""The features of training runs: their settings, and the parts in the order in which their hooks are called.

A feature is a file below `parts`, and here its line in `PARTS` and, if it has settings of its own, its record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import msgspec

from agentlightning.algorithm.base import PolicySpec
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.part import Part
from agentlightning.algorithm.parts.branches import Branches
from agentlightning.algorithm.parts.checkpoint_copy import Copies
from agentlightning.algorithm.parts.constraint import Constraint, Constraints
from agentlightning.algorithm.parts.correction import Correction, CorrectionKind
from agentlightning.algorithm.parts.critic import Critic
from agentlightning.algorithm.parts.curriculum import DrawnTasks
from agentlightning.algorithm.parts.explore import Explore
from agentlightning.algorithm.parts.gdpo import Decoupled
from agentlightning.algorithm.parts.gradient_noise import GradientNoise
from agentlightning.algorithm.parts.group_judge import GroupJudge
from agentlightning.algorithm.parts.group_reward import GroupRewards
from agentlightning.algorithm.parts.league import PLAYER, START, League, as_league
from agentlightning.algorithm.parts.moving_baseline import BaselineKey, MovingBaseline
from agentlightning.algorithm.parts.overlong import Overlong
from agentlightning.algorithm.parts.packing_check import PackingComparison
from agentlightning.algorithm.parts.preflight import Checks
from agentlightning.algorithm.parts.reference import Reference
from agentlightning.algorithm.parts.replay import Replay
from agentlightning.algorithm.parts.routing import ReplayedRouting
from agentlightning.algorithm.parts.scales import Scales
from agentlightning.algorithm.parts.sync_check import Agreement
from agentlightning.algorithm.parts.teacher import Teacher
from agentlightning.algorithm.parts.watched import Watched
from agentlightning.algorithm.records import Nested
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import ComputeSettings, ModelSettings, ModelSpec
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig
from agentlightning.litagent import LitAgent

PARTS: tuple[type[Part], ...] = (
    # whom rollouts play, which tasks they have
    DrawnTasks,
    League,
    Checks,
    Replay,
    GroupRewards,
    GroupJudge,
    Branches,
    Explore,
    Watched,
    Decoupled,
    # before credit: rewards, then what they are compared with
    Scales,
    Constraints,
    Critic,
    Reference,
    Teacher,
    MovingBaseline,
    # after credit
    Overlong,
    PackingComparison,
    GradientNoise,
    # passes
    Correction,
    ReplayedRouting,
    # after the passes, and after publication
    Agreement,
    Copies,
)


@dataclass(frozen=True, kw_only=True)
class FeatureSettings(TrainingSettings):
    """The settings of a training run together with those of its features, each a record (see `records`)."""

    kl: Nested[Reference, float] = Nested(Reference())
    """How near the policy is kept to the model that the run started from."""
    replay: Nested[Replay, int] = Nested(Replay())
    """Learn groups of earlier steps again."""
    correction: Nested[Correction, CorrectionKind] = Nested(Correction())
    """Importance weights for tokens of other weights."""
    overlong: Nested[Overlong, int] = Nested(Overlong())
    """Punish rollouts for their length."""
    baseline: Nested[MovingBaseline, BaselineKey] = Nested(MovingBaseline())
    """A moving average of earlier returns that is subtracted."""
    branches: Nested[Branches, int] = Nested(Branches())
    """How states in the middle of a rollout are valued by continuations."""
    explore: Nested[Explore, Literal["none", "fork_successes"]] = Nested(Explore())
    """Whether rare successes are gone on from."""
    critic: Nested[Critic, float] = Nested(Critic())
    """How the critic of PPO is used."""
    teacher: Nested[Teacher, str] = Nested(Teacher())
    """The model that `Distill` learns from."""
    league: League | str | Mapping[str, Any] | None = None
    """Play against frozen earlier versions of the policy, drawn by latest, uniform, pfsp or pfsp_even, or by a
    `League`. A rollout's metadata names its `opponent`."""
    group_judge: GroupJudge | Mapping[str, Any] | None = None
    """A model that scores the rollouts of each task together: a `GroupJudge`, or its settings by name."""
    constraint: Constraint | Mapping[str, Any] | Sequence[Any] | None = None
    """Bounds on the means of parts of the reward: an `agl.Constraint`, its settings by name, or a list of them."""
    preflight: Nested[Checks, Literal["refuse", "warn"]] = Nested(Checks())
    """What to do where training would be meaningless."""
    parts: Sequence[Part] = ()
    """Your own features: objects of classes that inherit from `agl.Part`."""

    def __post_init__(self) -> None:
        if self.plays is not None:
            self._derive(policies=self.policies or (PLAYER,), frozen=self.frozen or START)
        if isinstance(self.parts, list):
            self._derive(parts=tuple(self.parts))
        super().__post_init__()

    @property
    def features(self) -> list[Part]:
        """The parts that the settings ask for, and the user's own, in the order in which their hooks are called."""
        return [*(part for kind in PARTS if (part := kind.of(self)) is not None), *self.parts]

    @property
    def policy(self) -> PolicySpec:
        needs_reference = self.kl.coef != 0 or self.loss_spec.reference
        loaded = None if self.teacher.url else self.teacher.model
        compared = loaded or (self.model if needs_reference else None)
        members = [] if self.plays is None else self.plays.members
        model = _taken(self, ModelSettings) | _taken(self.compute, ComputeSettings)
        return PolicySpec(
            ModelSpec(**model, reference=compared, critic=self.credit_mode.critic, members=members),
            self.calls,
            self.backend,
        )

    def rate(self, done: int, taken: int, tasks: int) -> float:
        warms_up = self.credit_mode.critic and done < self.critic.warmup
        return 0.0 if warms_up else super().rate(done, taken, tasks)

    def loss_config(self) -> LossConfig:
        coef = self.kl.coef if self.kl.where == "loss" else 0.0
        return msgspec.structs.replace(super().loss_config(), kl_coef=coef, kl_estimator=self.kl.estimator)

    def credit_rule(self, *, shaped: bool = True) -> CreditRule:
        punished = (self.overlong.tokens, self.overlong.margin) if self.overlong.tokens and shaped else None
        rule = super().credit_rule(shaped=shaped)
        return replace(rule, lam=self.critic.lam, overlong=punished, constrained=Constraints.parts_in(self))

    @property
    def is_off_policy(self) -> bool:
        return super().is_off_policy or self.replay.groups > 0

    @property
    def plays(self) -> League | None:
        """The league that `league` describes; None without one."""
        return as_league(self.league)

    @property
    def correction_kind(self) -> str | None:
        """The importance weights in use."""
        return self.correction.kind_in(self)

    def check(self) -> None:
        """Raises ConfigError for settings that one of the features does not go together with."""
        for kind in PARTS:
            kind.check(self)

    def check_agent(self, agent: LitAgent[Any]) -> None:
        for part in self.features:
            part.check_agent(self, agent)

    def check_parts(self) -> None:
        """Raises ConfigError for a user's part that is not a `Part`, or has the name of another one."""
        names = {kind.name for kind in PARTS}
        for part in self.parts if isinstance(self.parts, Iterable) else (self.parts,):
            if not isinstance(part, Part):
                if isinstance(part, type) and issubclass(part, Part) and part is not Part:
                    raise ConfigError(f"parts has the class {part.__name__}. Give an object: {part.__name__}(…).")
                raise ConfigError(
                    f"parts has {part!r}; it takes objects of classes that inherit from agl.Part, which only a script "
                    "can give."
                )
            if part.name in names:
                raise ConfigError(f"parts has a second one called {part.name!r}; give its class another `name`.")
            names.add(part.name)


def _taken(settings: object, kind: type) -> dict[str, Any]:
    """The fields of the dataclass `kind`, with their values in settings that have them too."""
    return {f.name: getattr(settings, f.name) for f in fields(kind)}
