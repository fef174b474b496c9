"""How many rollouts of a step were punished for their length; the punishment itself is part of a unit's reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import NonNegativeInt, PositiveInt

from agentlightning.algorithm.credit.ratios import overlong_penalty
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update, refuse_below_zero
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.errors import ConfigError
from agentlightning.metrics.catalogue import TOKENS, Metric
from agentlightning.types.arrays import np

_OVERLONG = Needs(lambda s: s.overlong.tokens is not None, "overlong_tokens")


@dataclass(frozen=True, kw_only=True)
class Overlong(SettingsGroup, Part):
    """Soft punishment of long rollouts (DAPO, arXiv 2503.14476, section 3.4)."""

    metrics = (
        Metric(
            "overlong",
            "Rollouts punished for length",
            TOKENS,
            "rollouts",
            "With `overlong_tokens`: the rollouts whose reward was reduced for length.",
        ),
    )

    tokens: PositiveInt | None = None
    """A rollout that samples this many tokens earns 1 less."""
    margin: Annotated[NonNegativeInt, _OVERLONG] = 0
    """Within this many tokens below `overlong_tokens`, the penalty grows from 0 to 1."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Overlong | None:
        own = cls.given(settings)
        return None if own.tokens is None else own

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        s, part = settings, cls.given(settings)
        refuse_below_zero(s, "a penalty for length", "overlong_tokens", given=part.tokens is not None)
        if s.max_tokens is not None and (part.tokens or 0) - part.margin > s.max_tokens:
            raise ConfigError(
                f"No rollout can be overlong: it ends at max_tokens={s.max_tokens}, before overlong_tokens="
                f"{part.tokens} less the margin of {part.margin}. Lower overlong_tokens."
            )

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _LengthCount(self)


class _LengthCount(PolicyHooks):
    def __init__(self, part: Overlong) -> None:
        self._part = part

    async def after_credit(self, update: Update) -> None:
        tokens = np.array([e.sampled_tokens for e in update.episodes if not e.replayed], dtype=np.int32)
        punished = overlong_penalty(tokens, self._part.tokens or 0, self._part.margin) < 0
        update.metrics["overlong"] = int(punished.sum())
