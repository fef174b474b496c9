"""The model that the policy is kept near: a penalty for leaving it, in the loss or in the reward, and how it follows.

In the reward the divergence is k1's estimate, log π − log π_ref summed over a call's tokens. With a target the weight
of the penalty rises and falls by a proportional controller in log space: β ← β (1 + 0.1 e), e = KL / target − 1 within
±0.2 (Ziegler et al., arXiv 1909.08593, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from annotated_types import Gt, Le
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from agentlightning.algorithm.credit.ratios import mean_gap
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update, Updated, refuse_below_zero
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig, MovesReference
from agentlightning.metrics.catalogue import INTERNALS, STABLE, Metric
from agentlightning.types.arrays import Float32Array

_KL = Needs(lambda s: s.kl.coef != 0, "kl_coef")
_KL_LOSS = Needs(lambda s: s.kl.coef != 0 and s.kl.where == "loss", "kl_coef and kl_in='loss'")
_REFERENCE = Needs(
    lambda s: s.kl.coef != 0 or s.loss_spec.reference or s.teacher.hint is not None,
    "kl_coef, a loss with a reference, or agl.SelfDistill",
)
_FOLLOWS = Needs(lambda s: s.kl.every is not None, "reference_every")


@dataclass(frozen=True, kw_only=True)
class Reference(SettingsGroup, Part):
    """How near the policy is kept to the model that the run started from: `GRPO(…, kl=agl.Reference(coef=0.02))`."""

    metrics = (
        Metric(
            "kl_reference",
            "KL to the starting model",
            STABLE,
            "nats",
            "How far the policy is from the model it started from, per token.",
        ),
        Metric(
            "kl_coef",
            "Weight of the KL",
            INTERNALS,
            "",
            "With `kl_target`: the weight of the KL to the starting model.",
        ),
    )

    coef: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference, by default the model that the run started from."""
    where: Annotated[Literal["loss", "reward"], _KL] = "loss"
    """Where the divergence counts. In the reward it is k1's, summed over a call's tokens."""
    estimator: Annotated[Literal["k1", "k2", "k3"], _KL_LOSS] = "k3"
    """How the divergence is estimated from one sampled token: k1 = −log r, k2 = (log r)² / 2, k3 = r − 1 − log r, with
    r = π_ref / π."""
    target: Annotated[PositiveFloat | None, _KL] = None
    """Adjust the weight to keep the divergence near this many nats per token."""
    every: Annotated[PositiveInt | None, _REFERENCE] = None
    """Number of steps between updates of the reference. None: it stays the initial model."""
    share: Annotated[float, Gt(0), Le(1), _FOLLOWS] = 1.0
    """How far an update moves the reference towards the policy: 1 copies the policy; a small share in every step gives
    a moving average."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Reference | None:
        own = cls.given(settings)
        return own if own.coef or own.every is not None else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        s, own = settings, cls.given(settings)
        penalises = bool(own.coef) and own.where == "reward"
        refuse_below_zero(s, "a penalty for leaving the reference", "kl_in='reward'", given=penalises)
        if (own.coef or s.loss_spec.reference) and any(s.adapters.values()):
            raise ConfigError(
                "Policies that go on from adapters would be compared with the base model, not with what they began as. "
                "Leave kl_coef out, or train them one by one: model='<the adapter's directory>'."
            )
        if own.every is not None and s.ranks > 1:
            raise ConfigError("The reference of a learner over ranks stays: leave reference_every or ranks out.")
        if own.every is not None and s.adapters:
            raise ConfigError("A reference that follows the policy is for one policy: leave policies and league out.")

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _Divergence(self, policy)


class _Divergence(PolicyHooks):
    def __init__(self, part: Reference, policy: PolicyScope) -> None:
        self._part = part
        self._learner = policy.learner
        self._coef = part.coef
        self._steps = 0

    async def load(self, state: Mapping[str, Any]) -> None:
        self._coef = state.get("coef", self._coef)
        self._steps = state.get("steps", self._steps)

    def state(self) -> dict[str, Any]:
        return {"coef": self._coef, "steps": self._steps}

    async def before_credit(self, update: Update) -> None:
        if not self._part.coef or self._part.where != "reward":
            return
        gaps: list[Float32Array] = []
        for one in update.compared:
            own_E = await update.own_logprobs(one.batch)
            gaps.append(own_E - await self._learner.forward(one.batch, reference=True))
            penalties = {call: -self._coef * float(gap.sum()) for call, gap in one.by_call(gaps[-1]).items()}
            update.add_bonuses(penalties)
        if gaps:
            update.metrics["kl_reference"] = mean_gap(gaps)

    def loss(self, loss: LossConfig) -> LossConfig:
        return msgspec.structs.replace(loss, kl_coef=self._coef) if loss.kl_coef else loss

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        if (target := self._part.target) is not None:
            update.metrics["kl_coef"] = self._coef
            if (kl := update.metrics.get("kl_reference")) is not None:
                self._coef *= 1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2)
        self._steps += 1
        every = self._part.every
        if every is None or self._steps % every:
            return
        if not isinstance(self._learner, MovesReference):
            raise ConfigError("This backend's reference cannot follow the policy. Leave reference_every out.")
        await self._learner.move_reference(self._part.share)
