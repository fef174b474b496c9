"""Updating a policy from credited calls: packing, what the learner must be asked first, the passes, the steps.

Two checks guard the numbers: the canary (engine and learner agree on what was just sampled) and the certificate (a
packed group gives the gradients of its separate rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from agentlightning.algorithm.credit import credit
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.units import make_units
from agentlightning.algorithm.weights import correction_weights, overlong_penalty
from agentlightning.errors import EngineError
from agentlightning.learner.base import Learner, OptimParams, PackedBatch
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget, unique_tokens
from agentlightning.metrics import Reporter

_MEANS = ("entropy", "clip_fraction", "kl_old", "kl_reference", "critic_loss", "explained_variance")


class Updater:
    """Learns one step after the other."""

    def __init__(self, settings: TrainingSettings, learner: Learner, reporter: Reporter) -> None:
        self._settings = settings
        self._learner = learner
        self._reporter = reporter
        self._loss = settings.loss_config()
        self._rule = settings.credit_rule()
        self._version = 0
        """Of the weights, as far as it is known from what they sampled."""

    async def learn(self, episodes: Sequence[Episode], rate: float, *, certify: bool) -> dict[str, Any]:
        """One optimiser step per minibatch. With nothing to learn the weights stay and the metrics say so."""
        settings = self._settings
        expected, bonuses = await self._ask_first(episodes)
        batches = credit(episodes, self._rule, minibatches=settings.minibatches, values=expected, bonuses=bonuses)
        metrics: dict[str, Any] = {"staleness": self._staleness(episodes)} if settings.is_off_policy else {}
        if settings.overlong_tokens:
            tokens = np.array([e.sampled_tokens for e in episodes], dtype=np.int32)
            punished = overlong_penalty(tokens, settings.overlong_tokens, settings.overlong_margin)
            metrics["overlong"] = int((punished < 0).sum())
        if certify and batches:
            metrics |= await self._certify(batches[0])
        packed = [[pack(c) for c in self._split(batch)] for batch in batches]
        if settings.correction_kind is not None:
            packed, corrected = await self._correct(packed)
            metrics |= corrected
        parts: list[dict[str, float]] = []
        for batch in packed * settings.update_epochs:
            for part in batch:
                parts.append(await self._learner.forward_backward(part, self._loss))
                self._check_gap(parts[-1].get("logprob_gap_max", 0.0))
            parts[-1] |= await self._learner.optim_step(self._optim(rate))
            self._version = int(parts[-1]["version"])
        merged = _merge(parts)
        if not settings.samples:
            merged = {k: v for k, v in merged.items() if k not in ("kl_old", "clip_fraction")}
        return {**merged, **metrics}

    def _optim(self, rate: float) -> OptimParams:
        return OptimParams(
            learning_rate=rate,
            weight_decay=self._settings.weight_decay,
            max_grad_norm=self._settings.max_grad_norm,
            critic_learning_rate=self._settings.critic_learning_rate,
        )

    def _split(self, batch: Sequence[CreditedCall]) -> list[list[CreditedCall]]:
        return split_by_budget(batch, self._settings.tokens_per_batch, whole_groups=self._settings.loss_spec.pairs)

    def _staleness(self, episodes: Sequence[Episode]) -> int:
        """How many optimiser steps the oldest sampled token is behind."""
        versions = [run.version for e in episodes for c in e.calls if c.info.trained for run in c.versions]
        self._version = max([self._version, *versions])
        return self._version - min(versions, default=self._version)

    # ---- what the learner is asked before there are advantages -------------------------------------------------------

    async def _ask_first(self, episodes: Sequence[Episode]) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """By call id: what the critic expects before each token, and the penalty for leaving the reference."""
        settings = self._settings
        penalise = settings.kl_in == "reward" and settings.kl_coef != 0
        expected: dict[str, np.ndarray] = {}
        bonuses: dict[str, float] = {}
        if not settings.credit_mode.critic and not penalise:
            return expected, bonuses
        for calls in self._split(_uncredited(episodes, self._rule)):
            batch = pack(calls)
            ends = np.cumsum([len(c.call.response_ids) for c in calls])
            firsts = [0, *ends[:-1].tolist()]
            if settings.credit_mode.critic:
                values = np.split(await self._learner.values(batch), ends[:-1])
                expected |= {c.call.info.call_id: v for c, v in zip(calls, values, strict=True)}
            if penalise:
                gap_E = batch.old_logprobs_E - await self._learner.forward(batch, reference=True)
                sums = np.add.reduceat(gap_E, firsts)
                bonuses |= {
                    c.call.info.call_id: -settings.kl_coef * float(gap) for c, gap in zip(calls, sums, strict=True)
                }
        return expected, bonuses

    async def _correct(self, batches: list[list[PackedBatch]]) -> tuple[list[list[PackedBatch]], dict[str, float]]:
        """Let ratios start from the weights as they are now, and weigh tokens by how likely these would sample them."""
        settings = self._settings
        weights: list[np.ndarray] = []
        corrected: list[list[PackedBatch]] = []
        for parts in batches:
            corrected.append([])
            for batch in parts:
                now_E = await self._learner.forward(batch)
                weights_E = correction_weights(
                    now_E,
                    batch.old_logprobs_E,
                    batch.sequence_E,
                    settings.correction_kind or "token",
                    settings.correction_cap,
                    settings.correction_floor,
                )
                weights.append(weights_E)
                corrected[-1].append(
                    msgspec.structs.replace(
                        batch,
                        old_logprobs_E=now_E,
                        sampled_logprobs_E=batch.old_logprobs_E,
                        weights_E=batch.weights_E * weights_E,
                    )
                )
        if not weights:
            return corrected, {}
        all_E = np.concatenate(weights)
        return corrected, {"correction_mean": float(all_E.mean()), "corrected_to_zero": float((all_E == 0).mean())}

    # ---- checks ------------------------------------------------------------------------------------------------------

    async def _certify(self, batch: Sequence[CreditedCall]) -> dict[str, float]:
        """Compare a pass of the smallest group with its rows; the learner itself falls back to rows."""
        groups = {c.group: [d for d in batch if d.group == c.group] for c in batch}
        smallest = self._split(min(groups.values(), key=unique_tokens))[-1]
        found = await self._learner.certify(pack(smallest), self._loss)
        if not found.holds:
            self._reporter.warn(
                f"A packed token tree and its separate rows disagree (log-probs by {found.logprobs:.1e}, gradients by "
                f"{found.gradients:.1e}, relative): from here on every row is computed by itself, which is exact but "
                "slower. This model's attention is not what the packing takes it for: please report it."
            )
        return {"certificate_logprobs": found.logprobs, "certificate_gradients": found.gradients}

    def _check_gap(self, gap: float) -> None:
        """The canary: of what these very weights sampled, the learner must see the log-probs that the engine saw."""
        limit = self._settings.max_logprob_gap or (1e-3 if self._settings.dtype in ("float32", "float64") else 0.5)
        if gap > limit:
            raise EngineError(
                f"Engine and learner disagree about the same weights: log-probs of sampled tokens differ by {gap:.2e} "
                f"(limit {limit:.0e}). The run was stopped before it could train on wrong numbers; the last checkpoint "
                "is good. This is a bug in the engine's or the learner's support of this model: please report it."
            )


def _uncredited(episodes: Sequence[Episode], rule: Any) -> list[CreditedCall]:
    """All calls that are trained, worth nothing yet."""
    found: list[CreditedCall] = []
    for number, unit in enumerate(make_units(episodes, rule, {})):
        for call in unit.calls if unit.counts else ():
            zeros = np.zeros(len(call.response_ids), dtype=np.float32)
            found.append(CreditedCall(call, number, unit.rollout, zeros, zeros))
    return found


def _merge(parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Metrics of a step from those of its passes: means weighted by entries, sums, and the canary's largest gap."""
    if not parts:
        return {"updates": 0}
    entries = np.array([p["entries"] for p in parts])
    means = {k: float(np.average([p[k] for p in parts], weights=entries)) for k in _MEANS if k in parts[0]}
    norms = [p["grad_norm"] for p in parts if "grad_norm" in p]
    gaps = [p["logprob_gap_max"] for p in parts if "logprob_gap_max" in p]
    return {
        **means,
        "loss": sum(p["loss"] for p in parts),
        "grad_norm": float(np.mean(norms)),
        "updates": len(norms),
        "trained_tokens": int(entries.sum()),
        "tree_tokens": int(sum(p["tree_tokens"] for p in parts)),
        **({"logprob_gap_max": max(gaps)} if gaps else {}),
        "version": int(parts[-1]["version"]),
    }
