"""Updating a policy from credited calls: packing, what the learner must be asked first, the passes, the steps.

Two checks guard the numbers: engine and learner agree on every token that these weights sampled, and a packed group
gives the gradients of its separate rows. After the steps the loop publishes the weights (`sync_check`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from agentlightning.algorithm.baselines import MovingBaselines
from agentlightning.algorithm.credit import credit, explained_variance
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.privileged import PrivilegedContext
from agentlightning.algorithm.scales import RewardScales
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.teacher import EndpointTeacher
from agentlightning.algorithm.units import make_units
from agentlightning.algorithm.weights import (
    correction_measures,
    correction_weights,
    mean_kl,
    overlong_penalty,
    ratio_range,
)
from agentlightning.errors import ConfigError, EngineError
from agentlightning.learner.base import (
    ChecksPacking,
    KeepsRoutes,
    Learner,
    LossConfig,
    MeasuresNoise,
    MovesReference,
    OptimParams,
    PackedBatch,
    PassResult,
    StepResult,
    joined,
)
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget, unique_tokens
from agentlightning.metrics import Reporter
from agentlightning.types.arrays import np

OF_SAMPLES = ("kl_old", "clip_fraction", "ratio_min", "ratio_max")
"""Metrics that compare with the weights that sampled: none did where chats are learned."""


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one update learns from, packed in passes."""

    parts: Sequence[PackedBatch]
    groups: int
    half: int = 0
    """How many of the parts are the first half of the groups; 0: halves are not told apart."""
    share: float = 0.0
    """How much of the minibatch these are."""


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of one update."""

    passed: PassResult
    step: StepResult
    gap: float | None
    kl: float | None
    """How far engine and learner are apart on the tokens of the learner's own weights; None: there were none."""
    ratios: tuple[float, float]
    """The range of π / π_old before the step."""
    groups: int


class Updater:
    """Learns one step after the other."""

    def __init__(self, settings: TrainingSettings, learner: Learner, reporter: Reporter, *, version: int = 0) -> None:
        """`version`: of the learner's weights."""
        self._settings = settings
        self._learner = learner
        self._reporter = reporter
        self._loss = settings.loss_config()
        self._rule = settings.credit_rule()
        self.version = version
        """The version of the learner's weights."""
        self._told = False
        self._kl_coef = settings.kl_coef
        self._steps = 0
        self._teacher = EndpointTeacher(settings.teacher_url, settings.teacher or "") if settings.teacher_url else None
        self._hints = (
            PrivilegedContext(settings.hint, str(settings.model), settings.renderer) if settings.hint else None
        )
        self._scales = RewardScales()
        self._baselines = MovingBaselines(settings.baseline, settings.baseline_decay)

    def state(self) -> dict[str, Any]:
        """Numbers for a checkpoint that are not part of the learner's own state."""
        return {
            "kl_coef": self._kl_coef,
            "baselines": self._baselines.values,
            "steps": self._steps,
            "scales": self._scales.values,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; what is missing there stays as it is."""
        self._kl_coef = state.get("kl_coef", self._kl_coef)
        self._steps = state.get("steps", self._steps)
        self._scales.load(state.get("scales", {}))
        self._baselines.values |= state.get("baselines", {})

    async def learn(
        self, episodes: Sequence[Episode], rate: float, *, check_packing: bool, measure_noise: bool = False
    ) -> dict[str, Any]:
        """One optimiser step per minibatch. With nothing to learn the weights stay and the metrics say so."""
        settings = self._settings
        minibatches, metrics = await self.prepare(episodes, check_packing=check_packing, measure_noise=measure_noise)
        if settings.routing_replay:
            await self._keep_routes([part for batch in minibatches for part in batch.parts])
        done: list[Updated] = []
        for batch in [b for b in minibatches if b.parts] * settings.update_epochs:
            passed = await self._pass(batch)
            gap, kl = self._engine_gap(batch.parts, passed)
            step = await self._learner.optim_step(self.optim(rate))
            self.version = step.version
            old_E = np.concatenate([part.old_logprobs_E for part in batch.parts])
            done.append(Updated(passed, step, gap, kl, ratio_range(passed.logprobs, old_E), batch.groups))
        merged = _merge(done)
        if not settings.samples:
            merged = {k: v for k, v in merged.items() if k not in OF_SAMPLES}
        metrics = {**merged, **metrics}
        if settings.kl_target is not None:
            metrics["kl_coef"] = self._kl_coef
            self._adapt(metrics.get("kl_reference"), settings.kl_target)
        await self._move_reference()
        return metrics

    async def _keep_routes(self, parts: Sequence[PackedBatch]) -> None:
        if not isinstance(self._learner, KeepsRoutes):
            raise ConfigError("This backend cannot replay the routing of experts. Leave routing_replay out.")
        await self._learner.keep_routes(parts)

    async def _move_reference(self) -> None:
        """Moves the reference towards the policy, every `reference_every` steps."""
        settings, self._steps = self._settings, self._steps + 1
        if settings.reference_every is None or self._steps % settings.reference_every:
            return
        if not isinstance(self._learner, MovesReference):
            raise ConfigError("This backend's reference cannot follow the policy. Leave reference_every out.")
        await self._learner.move_reference(settings.reference_share)

    async def prepare(
        self, episodes: Sequence[Episode], *, check_packing: bool = False, measure_noise: bool = False
    ) -> tuple[list[Minibatch], dict[str, Any]]:
        """What each update of a step learns from (one without parts: nothing), and what was measured on the way."""
        settings = self._settings
        refuse_rewards_below_zero(settings, episodes)
        if settings.reward_scale == "source":
            episodes = self._scales.scaled(episodes)
        expected, bonuses, asked = await self._ask_first(episodes)
        if settings.baseline != "none":
            bonuses |= self._against_baselines(episodes, bonuses)
        batches = credit(
            episodes,
            self._rule,
            minibatches=settings.minibatches,
            values=expected,
            bonuses=bonuses,
            keep_empty=True,
        )
        metrics: dict[str, Any] = asked
        if settings.is_off_policy:
            metrics["staleness"] = self._staleness(episodes)
        if settings.credit_mode.critic:
            metrics["explained_variance"] = explained_variance(batches, expected)
        if settings.overlong_tokens:
            tokens = np.array([e.sampled_tokens for e in episodes if not e.replayed], dtype=np.int32)
            punished = overlong_penalty(tokens, settings.overlong_tokens, settings.overlong_margin)
            metrics["overlong"] = int((punished < 0).sum())
        if check_packing and any(batches):
            metrics |= await self._check_packing(next(filter(None, batches)))
        tells_halves = measure_noise and isinstance(self._learner, MeasuresNoise)
        minibatches = [self._packed(batch, tells_halves) for batch in batches]
        if settings.correction_kind is not None:
            minibatches, corrected = await self._correct(minibatches)
            metrics |= corrected
        return minibatches, metrics

    def _packed(self, batch: Sequence[CreditedCall], tells_halves: bool) -> Minibatch:
        groups = sorted({c.group for c in batch})
        first = set(groups[::2]) if tells_halves and len(groups) > 1 else set[int]()
        halves = [[c for c in batch if c.group in first], [c for c in batch if c.group not in first]]
        weights = [float(sum(c.weights.sum() for c in half)) for half in halves]
        if not all(weights):
            return Minibatch([pack(c) for c in self._split(batch)], len(groups))
        parts = [[pack(c) for c in self._split(half)] for half in halves]
        return Minibatch([*parts[0], *parts[1]], len(groups), len(parts[0]), weights[0] / sum(weights))

    async def _pass(self, batch: Minibatch) -> PassResult:
        """The gradient of all parts; where halves are told apart, the learner is told where the first one ends."""
        loss = self.loss
        if not batch.half or not isinstance(self._learner, MeasuresNoise):
            return await self._learner.forward_backward(batch.parts, loss)
        first = await self._learner.forward_backward(batch.parts[: batch.half], loss)
        await self._learner.keep_half(batch.share)
        return joined([first, await self._learner.forward_backward(batch.parts[batch.half :], loss)])

    @property
    def loss(self) -> LossConfig:
        """What is minimised now: the weight of the KL may have been adapted."""
        return msgspec.structs.replace(self._loss, kl_coef=self._kl_coef) if self._loss.kl_coef else self._loss

    def _adapt(self, kl: float | None, target: float) -> None:
        """A proportional controller in log space: β ← β (1 + 0.1 e), e = KL / target − 1 within ±0.2.

        Ziegler et al., arXiv 1909.08593, section 2.2.
        """
        if kl is not None:
            self._kl_coef *= 1 + 0.1 * min(max(kl / target - 1, -0.2), 0.2)

    def _against_baselines(self, episodes: Sequence[Episode], bonuses: Mapping[str, float]) -> dict[str, float]:
        """The bonuses of calls at which a baseline is subtracted."""
        found = self._baselines.subtract(episodes, make_units(episodes, self._rule, bonuses))
        return {call_id: bonuses.get(call_id, 0.0) + less for call_id, less in found.items()}

    def optim(self, rate: float) -> OptimParams:
        """The numbers of an optimiser step at this learning rate."""
        return OptimParams(
            learning_rate=rate,
            beta1=self._settings.adam_beta1,
            beta2=self._settings.adam_beta2,
            weight_decay=self._settings.weight_decay,
            max_grad_norm=self._settings.max_grad_norm,
            max_kl=self._settings.max_kl,
        )

    def _split(self, batch: Sequence[CreditedCall]) -> list[list[CreditedCall]]:
        return split_by_budget(batch, self._settings.tokens_per_batch, whole_groups=self._settings.loss_spec.pairs)

    def _staleness(self, episodes: Sequence[Episode]) -> int:
        """How many optimiser steps the oldest sampled token is behind."""
        versions = [run.version for e in episodes for c in e.calls if c.info.trained for run in c.versions]
        return max([self.version, *versions]) - min(versions, default=self.version)

    # ---- what the learner is asked before there are advantages -------------------------------------------------------

    async def _ask_first(
        self, episodes: Sequence[Episode]
    ) -> tuple[dict[str, np.ndarray], dict[str, float], dict[str, Any]]:
        """By call id: what the critic expects before each token, or how much likelier the teacher finds it, and the
        penalty for leaving the reference; and what was measured meanwhile.
        """
        settings = self._settings
        penalise = settings.kl_in == "reward" and settings.kl_coef != 0
        expected: dict[str, np.ndarray] = {}
        bonuses: dict[str, float] = {}
        gaps: list[np.ndarray] = []
        teaches = settings.credit_mode.teacher
        if not settings.credit_mode.critic and not penalise and not teaches:
            return expected, bonuses, {}
        for calls in self._split(_uncredited(episodes, self._rule)):
            batch, ids = pack(calls), [c.call.info.call_id for c in calls]
            ends = np.cumsum([len(c.call.response_ids) for c in calls])[:-1]
            if settings.credit_mode.critic:
                values = np.split(await self._learner.values(batch), ends)
                expected |= dict(zip(ids, values, strict=True))
            if penalise or teaches:
                seen = batch if self._hints is None else pack(self._hints.shown(calls, episodes))
                # Older weights sampled it: how far those of now are from the other model is what counts.
                own_E = await self._learner.forward(batch) if settings.is_off_policy else batch.old_logprobs_E
                gaps.append(own_E - await self._compared(seen, calls))
                by_call = zip(ids, np.split(gaps[-1], ends), strict=True)
                if teaches:
                    expected |= {call_id: -gap for call_id, gap in by_call}
                else:
                    bonuses |= {call_id: -self._kl_coef * float(gap.sum()) for call_id, gap in by_call}
        return expected, bonuses, _mean_gap("kl_teacher" if teaches else "kl_reference", gaps)

    async def _compared(self, batch: PackedBatch, calls: Sequence[CreditedCall]) -> np.ndarray:
        """How likely the reference, or the teacher, finds each entry of a pass."""
        if self._teacher is None:
            return await self._learner.forward(batch, reference=True)
        return np.concatenate(await self._teacher.logprobs([c.call for c in calls]))

    async def _correct(self, batches: Sequence[Minibatch]) -> tuple[list[Minibatch], dict[str, float]]:
        """Let ratios start from the weights as they are now, and weigh tokens by how likely these would sample them."""
        settings = self._settings
        weights: list[np.ndarray] = []
        corrected: list[Minibatch] = []
        for minibatch in batches:
            parts: list[PackedBatch] = []
            for batch in minibatch.parts:
                now_E = await self._learner.forward(batch)
                weights_E = correction_weights(
                    now_E,
                    batch.old_logprobs_E,
                    batch.sequence_E,
                    settings.correction_kind or "token",
                    settings.correction_cap,
                    settings.correction_floor,
                    settings.correction_veto,
                )
                weights.append(weights_E)
                parts.append(
                    msgspec.structs.replace(
                        batch,
                        old_logprobs_E=now_E,
                        sampled_logprobs_E=batch.old_logprobs_E,
                        weights_E=batch.weights_E * weights_E,
                    )
                )
            corrected.append(replace(minibatch, parts=parts))
        if not weights:
            return corrected, {}
        return corrected, correction_measures(np.concatenate(weights))

    # ---- checks ------------------------------------------------------------------------------------------------------

    async def _check_packing(self, batch: Sequence[CreditedCall]) -> dict[str, float]:
        """Compare a pass of the smallest group with its rows; the learner itself falls back to rows."""
        if not isinstance(self._learner, ChecksPacking):
            if not self._told:
                self._reporter.note("This backend cannot compare packed token trees with separate rows; it is trusted.")
            self._told = True
            return {}
        groups = {c.group: [d for d in batch if d.group == c.group] for c in batch}
        smallest = self._split(min(groups.values(), key=unique_tokens))[-1]
        found = await self._learner.check_packing(pack(smallest), self._loss)
        if not found.holds:
            self._reporter.warn(
                f"A packed token tree and its separate rows disagree (log-probs by {found.logprobs:.1e}, gradients by "
                f"{found.gradients:.1e}, relative): from here on every row is computed by itself, which is exact but "
                "slower. This model's attention is not what the packing takes it for: please report it."
            )
        return {"packing_gap_logprobs": found.logprobs, "packing_gap_gradients": found.gradients}

    def _engine_gap(self, batch: Sequence[PackedBatch], passed: PassResult) -> tuple[float, float] | tuple[None, None]:
        """How far learner and engine are apart on the tokens that the learner's weights sampled: the largest
        difference of log-probs, and the mean KL. None: there are no such tokens.

        Raises EngineError above the limit: one of the two computes something else than the other.
        """
        versions_E = np.concatenate([_versions(part) for part in batch])
        sampled_E = np.concatenate(
            [b.old_logprobs_E if b.sampled_logprobs_E is None else b.sampled_logprobs_E for b in batch]
        )
        fresh_E = versions_E == self.version
        if not fresh_E.any():
            return None, None
        gap = float(np.abs(passed.logprobs[fresh_E] - sampled_E[fresh_E]).max())
        if gap > self._settings.logprob_gap_limit:
            raise EngineError(
                f"Engine and learner disagree about the same weights: log-probs of sampled tokens differ by {gap:.2e} "
                f"(limit {self._settings.logprob_gap_limit:.0e}). The run was stopped before it could train on wrong "
                "numbers; the last checkpoint is good. This is a bug in the engine's or the learner's support of this "
                "model: please report it."
            )
        return gap, mean_kl(passed.logprobs[fresh_E], sampled_E[fresh_E])


def refuse_rewards_below_zero(settings: TrainingSettings, episodes: Sequence[Episode]) -> None:
    """Raises ConfigError where the advantage divides by the mean of the rewards, and one of them is negative."""
    if not settings.estimator.from_zero or not settings.credit_mode.compares:
        return
    lowest = min((r for e in episodes for r in (e.reward or 0.0, *(x.value for x in e.rewards))), default=0.0)
    if lowest < 0:
        raise ConfigError(
            f"advantage={settings.advantage!r} is for rewards of at least 0, best 0 and 1, and a rollout earned "
            f"{lowest:g}. Let the agent give rewards from 0 on, or take another advantage, such as 'grpo'."
        )


def _mean_gap(name: str, gaps: Sequence[np.ndarray]) -> dict[str, float]:
    """The mean of log π − log π_other over sampled tokens: k1's estimate of KL(π ‖ other)."""
    return {name: float(np.concatenate(gaps).mean())} if gaps else {}


def _versions(batch: PackedBatch) -> np.ndarray:
    return np.full(len(batch.targets_E), -1) if batch.version_E is None else batch.version_E


def _uncredited(episodes: Sequence[Episode], rule: Any) -> list[CreditedCall]:
    """All calls that are trained, worth nothing yet."""
    found: list[CreditedCall] = []
    for number, unit in enumerate(make_units(episodes, rule, {})):
        for call in unit.calls if unit.counts else ():
            zeros = np.zeros(len(call.response_ids), dtype=np.float32)
            found.append(CreditedCall(call, number, unit.rollout, zeros, zeros))
    return found


def _merge(done: Sequence[Updated]) -> dict[str, Any]:
    """Metrics of a step from those of its minibatches: means weighted by entries, sums, and the largest gap."""
    if not done:
        return {"updates": 0}
    passes, steps = [one.passed for one in done], [one.step for one in done]
    entries = np.array([len(p.logprobs) for p in passes])
    means = {k: float(np.average([p.metrics[k] for p in passes], weights=entries)) for k in passes[0].metrics}
    gaps = [one.gap for one in done if one.gap is not None]
    kls = [one.kl for one in done if one.kl is not None]
    moved = [step.metrics["kl_step"] for step in steps if "kl_step" in step.metrics]
    errors = [step.metrics["critic_loss"] for step in steps if "critic_loss" in step.metrics]
    return {
        **means,
        "loss": sum(p.loss for p in passes),
        "grad_norm": float(np.mean([step.grad_norm for step in steps])),
        "updates": len(steps),
        "trained_tokens": int(entries.sum()),
        "tree_tokens": sum(p.tree_tokens for p in passes),
        "ratio_min": min(one.ratios[0] for one in done),
        "ratio_max": max(one.ratios[1] for one in done),
        **({"logprob_gap_max": max(gaps), "kl_engine": float(np.mean(kls))} if gaps else {}),
        **({"kl_step": max(moved), "halvings": int(sum(s.metrics["halvings"] for s in steps))} if moved else {}),
        **({"critic_loss": float(np.mean(errors))} if errors else {}),
        **_noise(done),
        "version": steps[-1].version,
    }


def _noise(done: Sequence[Updated]) -> dict[str, float]:
    """Signal and noise of the gradient over the updates in which they were measured; see `learner.noise`.

    `gradient_noise_scale` is tr Σ / |G|² in groups: the groups per update from which on more teach little. Where no
    signal was seen there is none.
    """
    measured = [one for one in done if "gradient_cosine" in one.step.metrics]
    if not measured:
        return {}
    names = ("gradient_cosine", "gradient_signal", "gradient_noise")
    found = {name: float(np.mean([one.step.metrics[name] for one in measured])) for name in names}
    scale = float(np.mean([one.groups for one in measured])) * found["gradient_noise"]
    signal = found["gradient_signal"]
    return found | ({"gradient_noise_scale": scale / signal} if signal > 0 else {})
