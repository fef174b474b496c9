"""GDPO: each named part of a reward is compared by itself (Liu et al., arXiv 2601.05242): `credit` has the formula."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.parts.reference import Reference
from agentlightning.algorithm.rollout_verdicts import absent_part
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled


@dataclass(frozen=True, kw_only=True)
class Decoupled(Part):
    """Present where parts of a reward have weights."""

    names: Sequence[str]

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return cls(names=tuple(settings.reward_weights)) if settings.reward_weights else None

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
        kl = Reference.given(s)
        if kl.coef and kl.where == "reward":
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
            self._reporter.warn(absent_part(missing[0], " of reward_weights, so that its weight has no effect", found))
            self._done = True
        return {}
