"""Learning from tokens of other weights: ratios start from the weights as they are now, and tokens are weighed by how
likely these would sample them (`ratios.correction_weights`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import msgspec
from pydantic import NonNegativeFloat, PositiveFloat

from agentlightning.algorithm.credit.ratios import correction_measures, correction_weights
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.part import Minibatch, Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.errors import ConfigError
from agentlightning.learner.base import PackedBatch
from agentlightning.metrics.catalogue import STABLE, Metric
from agentlightning.types.arrays import Float32Array, np

CorrectionKind = Literal["auto", "none", "token", "sequence", "mask", "sequence_mask"]
_CORRECTED = Needs(lambda s: s.correction_kind is not None, "a correction, as with max_staleness")
_MASKED = Needs(lambda s: (s.correction_kind or "").endswith("mask"), "correction='mask' or 'sequence_mask'")


@dataclass(frozen=True, kw_only=True)
class Correction(SettingsGroup, Part):
    """Importance weights for tokens of other weights; and how old the oldest sampled token is."""

    metrics = (
        Metric(
            "correction_mean",
            "Mean importance weight",
            STABLE,
            "",
            "The mean importance weight of tokens sampled by older weights.",
        ),
        Metric(
            "corrected_to_zero",
            "Tokens with weight 0",
            STABLE,
            "share",
            "The share of tokens whose importance weight is 0.",
        ),
    )

    kind: CorrectionKind = "auto"
    """Importance weights for tokens sampled with older weights: token, sequence, mask, sequence_mask, none; "auto" is
    token if sampling runs ahead or groups carry over or are replayed, otherwise none. SFT and DPO have none."""
    cap: Annotated[PositiveFloat, _CORRECTED] = 2.0
    """Largest importance weight; the two mask corrections mask tokens above it."""
    floor: Annotated[NonNegativeFloat, _MASKED] = 0.5
    """Lower bound of the two mask corrections: they mask tokens with smaller ratios."""
    veto: Annotated[PositiveFloat | None, _CORRECTED] = None
    """Leave out a sequence that has a token with a ratio below this, such as 1e-4."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Correction | None:
        """With the `kind` that "auto" stands for; None where nothing is off-policy and nothing is corrected."""
        own = cls.given(settings)
        kind = own.kind_in(settings) or "none"
        return replace(own, kind=kind) if kind != "none" or settings.is_off_policy else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if settings.is_supervised and cls.given(settings).kind not in ("auto", "none"):
            raise ConfigError(
                f"{type(settings).__name__} learns what is good whoever sampled it: importance weights would unlearn "
                "it. Leave correction out."
            )

    def kind_in(self, settings: TrainingSettings) -> str | None:
        """The importance weights that are in use with these settings."""
        if self.kind == "auto":
            return "token" if settings.is_off_policy and not settings.is_supervised else None
        return None if self.kind == "none" else self.kind

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _ImportanceWeights(self, policy)

    def weights(self, old_E: Float32Array, sampled_E: Float32Array, batch: PackedBatch) -> Float32Array:
        """The importance weights of a pass, [E]; ones where nothing is corrected."""
        if self.kind == "none":
            return np.ones(len(old_E), dtype=np.float32)
        return correction_weights(old_E, sampled_E, batch.sequence_E, self.kind, self.cap, self.floor, self.veto)


class _ImportanceWeights(PolicyHooks):
    def __init__(self, part: Correction, policy: PolicyScope) -> None:
        self._part = part
        self._learner = policy.learner
        self._may_be_stale = policy.settings.is_off_policy

    async def after_credit(self, update: Update) -> None:
        if self._may_be_stale:
            update.metrics["staleness"] = staleness(update.episodes, update.version)

    async def packed(self, update: Update) -> None:
        if self._part.kind == "none":
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
