"""How much of the gradient is signal: now and then the gradients of two halves of a minibatch are compared.

See `learner.noise` for the measures. `gradient_noise_scale` is tr Σ / |G|² in groups: the groups per update from which
on more teach little (McCandlish et al., arXiv 1812.06162). Where no signal was seen there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update, Updated
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.learner.base import MeasuresNoise
from agentlightning.learner.packing import CreditedCall
from agentlightning.metrics.catalogue import INTERNALS, Metric
from agentlightning.types.arrays import np

MEASURES = ("gradient_cosine", "gradient_signal", "gradient_noise")


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Part):
    """Measures every so many steps."""

    metrics = (
        Metric(
            "gradient_cosine",
            "Cosine of half gradients",
            INTERNALS,
            "",
            "The cosine of the gradients of two halves of the step's groups.",
        ),
        Metric(
            "gradient_signal",
            "Signal of the gradient",
            INTERNALS,
            "",
            "The estimate of |G|², from two halves of the step's groups.",
        ),
        Metric(
            "gradient_noise",
            "Noise of the gradient",
            INTERNALS,
            "",
            "The estimate of tr Σ/B in the step's gradient. Average signal and noise over steps before you divide "
            "them.",
        ),
        Metric(
            "gradient_noise_scale",
            "Gradient noise scale",
            INTERNALS,
            "groups",
            "tr Σ / |G|² in groups (arXiv 1812.06162, appendix A.1): a step with more groups gains little. Left out "
            "if no signal was seen.",
        ),
    )

    every: int = 5

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        every = settings.gradient_noise_every
        return cls(every=every) if every and settings.ranks == 1 else None

    def in_policy(self, policy: PolicyScope) -> PolicyHooks | None:
        return _Halves(self.every, policy.learner) if isinstance(policy.learner, MeasuresNoise) else None


class _Halves(PolicyHooks):
    def __init__(self, every: int, learner: MeasuresNoise) -> None:
        self._every = every
        self._learner = learner

    def sections(self, update: Update, batch: Sequence[CreditedCall]) -> list[list[CreditedCall]] | None:
        groups = sorted({c.group for c in batch})
        if not update.is_due(self._every) or len(groups) < 2:
            return None
        first = set(groups[::2])
        return [[c for c in batch if c.group in first], [c for c in batch if c.group not in first]]

    async def after_section(self, share: float) -> None:
        await self._learner.keep_half(share)

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        measured = [one for one in done if MEASURES[0] in one.step.metrics]
        if not measured:
            return
        found = {name: float(np.mean([one.step.metrics[name] for one in measured])) for name in MEASURES}
        scale = float(np.mean([one.minibatch.groups for one in measured])) * found["gradient_noise"]
        signal = found["gradient_signal"]
        update.metrics |= found | ({"gradient_noise_scale": scale / signal} if signal > 0 else {})
