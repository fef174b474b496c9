"""How many rollouts of a step were punished for their length; the punishment itself is part of a unit's reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update, refuse_below_zero
from agentlightning.algorithm.weights import overlong_penalty
from agentlightning.errors import ConfigError
from agentlightning.types.arrays import np

if TYPE_CHECKING:
    from agentlightning.algorithm.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Overlong(Part):
    """Soft punishment of long rollouts (DAPO, arXiv 2503.14476, section 3.4)."""

    tokens: int
    margin: int = 0

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        tokens, margin = settings.overlong_tokens, settings.overlong_margin
        return None if not tokens else cls(tokens=tokens, margin=margin)

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        s = settings
        refuse_below_zero(s, "a penalty for length", "overlong_tokens", given=bool(s.overlong_tokens))
        if s.max_tokens is not None and (s.overlong_tokens or 0) - s.overlong_margin > s.max_tokens:
            raise ConfigError(
                f"No rollout can be overlong: it ends at max_tokens={s.max_tokens}, before overlong_tokens="
                f"{s.overlong_tokens} less the margin of {s.overlong_margin}. Lower overlong_tokens."
            )

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _Count(self)


class _Count(PolicyHooks):
    def __init__(self, part: Overlong) -> None:
        self._part = part

    async def after_credit(self, update: Update) -> None:
        tokens = np.array([e.sampled_tokens for e in update.episodes if not e.replayed], dtype=np.int32)
        punished = overlong_penalty(tokens, self._part.tokens, self._part.margin) < 0
        update.metrics["overlong"] = int(punished.sum())
