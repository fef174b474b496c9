"""What if: the gradient of a stored step under other losses, advantages, credits and corrections. No new rollouts.

The step is done again on a learner of its own, update by update as the run took it. Before each update every variant
computes its gradient of the same rollouts at the same weights; then the update is taken, so that the ratios of later
minibatches and epochs are what they were. Nothing is published and nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from agentlightning.algorithm.credit.assignment import refuse_rewards_below_zero, seen_by
from agentlightning.algorithm.credit.ratios import correction_measures, mean_kl, ratio_range
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.part import Minibatch
from agentlightning.algorithm.parts.correction import Correction
from agentlightning.algorithm.records import replaced, settings_of, value_of
from agentlightning.algorithm.update import Updater
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Learner, PackedBatch
from agentlightning.metrics import Reporter
from agentlightning.store.base import LightningStore
from agentlightning.types import FINISHED_ROLLOUT, RolloutMode
from agentlightning.types.arrays import np
from agentlightning.types.call import Float32Array
from agentlightning.types.finding import counted
from agentlightning.types.recording import FORK_OF

if TYPE_CHECKING:
    from agentlightning.learner.compare import Gradient
    from agentlightning.learner.torch_learner import TorchLearner

TAKEN = "taken"
_COMPARED = (
    *({"advantage": name} for name in ("grpo", "drgrpo", "rloo", "maxrl", "reinforce++", "reinforce")),
    {"loss": "ppo_clip"},
    {"loss": "gspo", "clip_low": None, "clip_high": None},
    {"loss": "cispo", "clip_low": None, "clip_high": None},
    {"loss": "reinforce"},
    *({"credit": name} for name in ("broadcast", "return_to_go", "per_turn", "gigpo")),
    *({"normalization": name} for name in ("token", "sequence", "constant")),
    *({"correction": name} for name in ("none", "token", "mask", "sequence_mask")),
)
"""What is asked where nothing is: those that the run could have been and was not."""
_FROM_OUTSIDE = (
    *("minibatches", "update_epochs", "model", "lora_rank", "dtype", "steps", "group_size", "tasks_per_step"),
    *("learning_rate", "schedule", "warmup_steps", "epochs", "weight_decay", "adam_beta1", "adam_beta2", "max_kl"),
)
"""Settings that another step would have been taken with, not another gradient of this one."""
_OF_ONE_KIND = ("clip_low", "clip_high", "gamma", "lam", "advantage", "rollout_return", "correction_cap")
"""Settings that not every loss, credit or correction uses."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredStep:
    """A step that a run took, as its store has it."""

    step: int
    episodes: Sequence[Episode]
    settings: FeatureSettings
    metrics: Mapping[str, Any]
    learning: Mapping[str, Any] = field(default_factory=dict)
    """What the run's updates had come to know before it (`Updater.state`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The gradient of one variant beside the one that was taken. Means over the updates of the step."""

    name: str
    cosine: float | None
    """The cosine to the gradient that was taken; None if one of the two is zero."""
    grad_norm: float
    effective_sample_size: float
    """Of the importance weights, as a share of the tokens: (Σw)² / (n Σw²); see `ratios.correction_measures`."""
    clip_fraction: float
    ratio_min: float
    ratio_max: float
    zero_advantages: float
    """Share of the sampled tokens that teach nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The result of a what-if. The first of `compared` is the step as it was taken."""

    compared: Sequence[Compared]
    logprob_gap: float
    """The largest difference between the log-probs that were stored and those of the weights that were used."""
    kl: float
    """The same as a mean, in nats per token: KL of the weights that sampled from those that were used."""
    updates: int


# ---- the step as it is stored ----------------------------------------------------------------------------------------


async def stored_episodes(
    store: LightningStore,
    run_id: str | None,
    settings: FeatureSettings,
    metrics: Mapping[str, Any],
    policy: str | None,
) -> list[Episode]:
    """The rollouts that a step learned from, in its order. `metrics` is the step's row.

    Raises ConfigError where they are not in the store (any more).
    """
    step, names = int(metrics["step"]), _group_names(metrics)
    chosen: Any = {"group_in": tuple(names)} if names is not None else {"step_in": (step,)}
    page = await store.query_rollouts(
        run_id_in=None if run_id is None else (run_id,),
        mode_in=(RolloutMode.TRAIN,),
        status_in=tuple(FINISHED_ROLLOUT),
        sort_by="start_time",
        limit=-1,
        **chosen,
    )
    groups: dict[Any, list[str]] = {name: [] for name in names or ()}
    for rollout in page:
        if FORK_OF in rollout.metadata:
            continue
        groups.setdefault(rollout.group, []).append(rollout.rollout_id)
    # A step that was interrupted and done again has groups of the same names twice: the later ones were learned.
    ids = [rollout_id for group in groups.values() for rollout_id in group[-settings.group_size :]]
    again = set(metrics.get("replayed_groups", ()))
    found = await collect(store, ids, settings.reward_weights)
    episodes = [replace(e, replayed=e.rollout.group in again) for e in found]
    if not episodes:
        raise ConfigError(f"The store holds no rollouts that step {step} learned from.")
    if policy is None:
        return episodes
    seen = [seen_by(policy, e) for e in episodes]
    return [e for e in seen if any(c.info.trained for c in e.calls)]


def _group_names(metrics: Mapping[str, Any]) -> list[str] | None:
    """Of the groups that the step learned from, the replayed ones last; None where they have no names."""
    if metrics.get("replayed") and "replayed_groups" not in metrics:
        raise ConfigError(
            f"Step {metrics['step']} learned {counted(metrics['replayed'], 'replayed rollout')} again, and an "
            "older version of "
            "this package, which recorded it, did not write down which: the step cannot be done again."
        )
    names = metrics.get("groups")
    return None if names is None else [*names, *metrics.get("replayed_groups", ())]


# ---- variants --------------------------------------------------------------------------------------------------------


def telling_variants(settings: FeatureSettings, episodes: Sequence[Episode] = ()) -> dict[str, FeatureSettings]:
    """Those that are asked where the user asks for none: losses, advantages, credits, normalisations, corrections.

    `episodes`: what the step learned from; variants that are not for such rewards are left out.
    """
    found: dict[str, FeatureSettings] = {}
    for changes in _COMPARED:
        name = next(iter(changes))
        if value_of(settings, name) != changes[name] and not _same_correction(settings, changes):
            try:
                made = variant(settings, changes)
                refuse_rewards_below_zero(made.credit_rule(), episodes)
                found[_named(changes)] = made
            except ConfigError:
                continue  # it does not go together with how the run was set, or with what was earned
    return found


def variant(settings: FeatureSettings, changes: Mapping[str, Any]) -> FeatureSettings:
    """The run's settings with these in the place of its own. Raises ConfigError for what would need other rollouts,
    another learner, or does not go together.

    What the run set for its own loss or credit alone goes back to the default where the change leaves it without use.
    """
    for name in changes:
        if name in _FROM_OUTSIDE:
            raise ConfigError(f"{name} is no part of a gradient: a stored step cannot be taken with another one.")
    try:
        changed = replaced(settings, changes)
    except ConfigError:
        plain = {name: one.default for name, one in settings_of(GRPO).items() if name in _OF_ONE_KIND}
        changed = replaced(settings, plain | dict(changes))
    if changed.credit_mode.critic and not settings.credit_mode.critic:
        raise ConfigError(f"credit={changed.credit!r} needs a critic, and this run trained none.")
    if changed.credit_mode.teacher and not settings.credit_mode.teacher:
        raise ConfigError(f"credit={changed.credit!r} needs a teacher, and this run had none.")
    return changed


def needs_reference(settings: Sequence[FeatureSettings]) -> str | None:
    """The model that a learner for these compares with; None: none is needed."""
    return next((path for s in settings if (path := s.policy.model.reference)), None)


def _same_correction(settings: FeatureSettings, changes: Mapping[str, Any]) -> bool:
    correction = changes.get("correction")
    return correction is not None and (None if correction == "none" else correction) == settings.correction_kind


def _named(changes: Mapping[str, Any]) -> str:
    name, value = next(iter(changes.items()))
    return f"{name}={value}"


# ---- computing them --------------------------------------------------------------------------------------------------


class _Here:
    """The verbs that batches are prepared with, on a learner in this process."""

    def __init__(self, learner: TorchLearner) -> None:
        self._learner = learner

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        return self._learner.forward(batch, reference=reference)

    async def values(self, batch: PackedBatch) -> Float32Array:
        return self._learner.values(batch)


@dataclass(slots=True, eq=False)
class _Variant:
    """A variant while the step is done again, and what was seen of it so far."""

    updater: Updater
    settings: FeatureSettings
    minibatches: Sequence[Minibatch]
    cosines: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    ratios: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    """Sampled tokens that teach anything, in the first epoch."""


async def what_if(step: StoredStep, learner: TorchLearner, variants: Mapping[str, FeatureSettings]) -> WhatIf:
    """Compare variants of a step with what was taken. `learner` has the weights that it began with, and is used up."""
    from agentlightning.learner.compare import gradient_of

    found = {name: await _prepared(step, learner, s) for name, s in {TAKEN: step.settings, **variants}.items()}
    taken, epochs = found[TAKEN], step.settings.update_epochs
    turns = [n for n, batch in enumerate(taken.minibatches) if batch.passes] * epochs
    if not turns:
        raise ConfigError(
            f"Step {step.step} taught nothing: all siblings of all groups earned the same. Take "
            "another one, --step N (agl show RUN --step N), or see  agl why RUN."
        )
    gaps: list[np.ndarray] = []
    for turn, n in enumerate(turns):
        base = None
        for name, one in found.items():
            batch = one.minibatches[n]
            gradient = gradient_of(learner, batch.passes, one.updater.loss)
            base = gradient if name == TAKEN else base
            assert base is not None
            _note(one, batch, gradient, base, first=turn < len(turns) // epochs)
            if turn == 0 and name == TAKEN:
                gaps = [gradient.logprobs_E - _sampled(batch)]
        if turn + 1 < len(turns):
            _take(learner, taken, taken.minibatches[n], float(step.metrics.get("learning_rate") or 0.0))
    tokens = sum(e.sampled_tokens for e in step.episodes)
    gap_E = np.concatenate(gaps)
    return WhatIf(
        compared=[_compared(name, one, tokens) for name, one in found.items()],
        logprob_gap=float(np.abs(gap_E).max()),
        kl=mean_kl(gap_E, np.zeros_like(gap_E)),
        updates=len(turns),
    )


async def _prepared(step: StoredStep, learner: TorchLearner, settings: FeatureSettings) -> _Variant:
    gradients = replace(settings, routing_replay=False)  # it says where gradients go, and this learner takes them there
    updater = Updater(gradients, cast(Learner, _Here(learner)), Reporter(), version=learner.policy.version)
    await updater.parts.load(step.learning)
    return _Variant(updater, settings, (await updater.prepare(step.episodes)).minibatches)


def _take(learner: TorchLearner, taken: _Variant, batch: Minibatch, rate: float) -> None:
    """The update as the run took it."""
    for one in batch.passes:
        learner.forward_backward(one, taken.updater.loss)
    learner.optim_step(taken.updater.optim(rate))


def _note(one: _Variant, batch: Minibatch, gradient: Gradient, base: Gradient, *, first: bool) -> None:
    one.norms.append(gradient.norm)
    if gradient.norm and base.norm:
        one.cosines.append(gradient.dot(base) / (gradient.norm * base.norm))
    if not batch.passes:
        return
    one.clipped.append(gradient.clip_fraction)
    old_E = np.concatenate([b.old_logprobs_E for b in batch.passes])
    one.ratios.append(ratio_range(gradient.logprobs_E, old_E))
    weights_E = np.exp(gradient.logprobs_E - old_E) * np.concatenate(list(_corrections(one.settings, batch)))
    one.sizes.append(correction_measures(weights_E.astype(np.float32))["effective_sample_size"])
    if first:
        one.tokens += sum(int(np.count_nonzero(b.advantages_E)) for b in batch.passes)


def _corrections(settings: FeatureSettings, batch: Minibatch) -> Iterator[np.ndarray]:
    """The importance weights that are constants in the loss, [E]; ones where nothing is corrected."""
    correction = Correction.of(settings)
    for one in batch.passes:
        if correction is None or one.sampled_logprobs_E is None:
            yield np.ones(len(one.targets_E))
        else:
            yield correction.weights(one.old_logprobs_E, one.sampled_logprobs_E, one)


def _sampled(batch: Minibatch) -> np.ndarray:
    return np.concatenate(
        [b.old_logprobs_E if b.sampled_logprobs_E is None else b.sampled_logprobs_E for b in batch.passes]
    )


def _compared(name: str, one: _Variant, tokens: int) -> Compared:
    return Compared(
        name=name,
        cosine=float(np.mean(one.cosines)) if one.cosines else None,
        grad_norm=float(np.mean(one.norms)),
        effective_sample_size=float(np.mean(one.sizes)) if one.sizes else 0.0,
        clip_fraction=float(np.mean(one.clipped)) if one.clipped else 0.0,
        ratio_min=min((low for low, _ in one.ratios), default=math.nan),
        ratio_max=max((high for _, high in one.ratios), default=math.nan),
        zero_advantages=1.0 - one.tokens / tokens if tokens else 0.0,
    )
