"""The critic of PPO: what it expects before each token is what returns are compared with (`modes`: gae, token_gae)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import NonNegativeInt

from agentlightning.algorithm.credit.assignment import explained_variance
from agentlightning.algorithm.credit.modes import CREDIT_MODES
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update, Updated
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup, one_of
from agentlightning.learner.base import Learner
from agentlightning.metrics.catalogue import STABLE, Metric
from agentlightning.types.arrays import np

_CRITIC = Needs(lambda s: s.credit_mode.critic, f"credit={one_of(CREDIT_MODES, lambda m: m.critic)} (PPO)")


@dataclass(frozen=True, kw_only=True)
class Critic(SettingsGroup, Part):
    """Present where the way of credit compares with a critic: `PPO(…, critic=agl.Critic(lam=0.9))`."""

    name = "critic"

    metrics = (
        Metric(
            "critic_loss",
            "Loss of the critic",
            STABLE,
            "",
            "The critic's squared error before it learned from the step.",
        ),
        Metric(
            "explained_variance",
            "Variance explained by the critic",
            STABLE,
            "share",
            "The share of the returns' variance that the critic predicted.",
        ),
    )

    lam: Annotated[float, Ge(0), Le(1), _CRITIC] = 1.0
    """λ of generalised advantage estimation."""
    warmup: Annotated[NonNegativeInt, _CRITIC] = 0
    """Number of first steps in which only the critic learns."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Critic | None:
        return cls.given(settings) if settings.credit_mode.critic else None

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _Expectations(policy.learner)


class _Expectations(PolicyHooks):
    def __init__(self, learner: Learner) -> None:
        self._learner = learner

    async def before_credit(self, update: Update) -> None:
        for one in update.compared:
            update.values |= one.by_call(await self._learner.values(one.batch))

    async def after_credit(self, update: Update) -> None:
        update.metrics["explained_variance"] = explained_variance(update.batches, update.values)

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        if losses := [one.step.metrics["critic_loss"] for one in done if "critic_loss" in one.step.metrics]:
            update.metrics["critic_loss"] = float(np.mean(losses))
