"""Learning from tokens of other weights: ratios start from the weights as they are now, and tokens are weighed by how
likely these would sample them (`weights.correction_weights`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import msgspec

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Minibatch, Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.weights import correction_measures, correction_weights
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Learner, PackedBatch
from agentlightning.types.arrays import Float32Array, np

if TYPE_CHECKING:
    from agentlightning.algorithm.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class Correction(Part):
    """Importance weights, and how old the oldest sampled token is; present where either plays a part."""

    kind: str | None
    """A name in `weights.CORRECTIONS`; None: older weights may have sampled, and nothing is corrected."""
    cap: float = 2.0
    floor: float = 0.5
    veto: float | None = None
    stale: bool = False
    """Whether tokens may be of older weights than the ones that learn from them."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        s = settings
        if s.correction_kind is None and not s.is_off_policy:
            return None
        return cls(
            kind=s.correction_kind,
            cap=s.correction_cap,
            floor=s.correction_floor,
            veto=s.correction_veto,
            stale=s.is_off_policy,
        )

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if settings.is_supervised and settings.correction not in ("auto", "none"):
            raise ConfigError(
                f"{type(settings).__name__} learns what is good whoever sampled it: importance weights would unlearn "
                "it. Leave correction out."
            )

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _ImportanceWeights(self, policy.learner)

    def weights(self, old_E: Float32Array, sampled_E: Float32Array, batch: PackedBatch) -> Float32Array:
        """The importance weights of a pass, [E]; ones where nothing is corrected."""
        if self.kind is None:
            return np.ones(len(old_E), dtype=np.float32)
        return correction_weights(old_E, sampled_E, batch.sequence_E, self.kind, self.cap, self.floor, self.veto)


class _ImportanceWeights(PolicyHooks):
    def __init__(self, part: Correction, learner: Learner) -> None:
        self._part = part
        self._learner = learner

    async def after_credit(self, update: Update) -> None:
        if self._part.stale:
            update.metrics["staleness"] = staleness(update.episodes, update.version)

    async def packed(self, update: Update) -> None:
        if self._part.kind is None:
            return
        weights: list[Float32Array] = []
        update.minibatches = [await self._corrected(one, weights) for one in update.minibatches]
        if weights:
            update.metrics |= correction_measures(np.concatenate(weights))

    async def _corrected(self, minibatch: Minibatch, weights: list[Float32Array]) -> Minibatch:
        sections: list[list[PackedBatch]] = []
        for section in minibatch.sections:
            sections.append([])
            for batch in section:
                now_E = await self._learner.forward(batch)
                weights.append(self._part.weights(now_E, batch.old_logprobs_E, batch))
                sections[-1].append(
                    msgspec.structs.replace(
                        batch,
                        old_logprobs_E=now_E,
                        sampled_logprobs_E=batch.old_logprobs_E,
                        weights_E=batch.weights_E * weights[-1],
                    )
                )
        return Minibatch(sections, minibatch.shares, minibatch.groups)


def staleness(episodes: Sequence[Episode], version: int) -> int:
    """How many optimiser steps the oldest sampled token is behind the learner's weights."""
    versions = [run.version for e in episodes for c in e.calls if c.info.trained for run in c.versions]
    return max([version, *versions]) - min(versions, default=version)
