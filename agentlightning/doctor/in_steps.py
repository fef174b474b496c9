"""What the metrics of a run's steps say. Pure: each check takes the evidence and gives findings.

Numbers are judged over the last steps; single steps tell nothing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentlightning.algorithm.features import PARTS
from agentlightning.algorithm.verdicts import (
    CLIPPED,
    FALSE_ALARMS,
    WATCHED_STEPS,
    Validated,
    fallen,
    has_overfitted,
    has_risen,
    may_stand_still,
    not_risen,
)
from agentlightning.doctor.evidence import Evidence
from agentlightning.errors import ModelError
from agentlightning.models import shipped_models
from agentlightning.models.shape import LOGPROB_GAP, ModelShape, read_shape
from agentlightning.types.finding import Finding, note, problem, warning

RECENT = 8
"""Steps that are the recent ones."""
FEW = 4
"""Fewer steps than this say nothing of a trend."""
NOISY = 0.1
"""A gradient whose signal is this much of its noise, or less, is mostly noise."""
MEASURED = 4
"""Measurements of the noise that are needed: one alone is as noisy."""
FAR_OFF = 10
"""A learning rate is far off at so many times the usual one, or so little of it."""
KL_LARGE = 0.1
"""Nats per token between the weights that sampled and those that learned."""


def step_findings(evidence: Evidence) -> Iterator[Finding]:
    """All findings about the metrics of training steps."""
    for check in (
        _not_finite,
        _rate,
        _far_off,
        _no_updates,
        _trend,
        _validation,
        _clipping,
        _entropy,
        _moved,
        _weights,
        _gap,
    ):
        yield from check(evidence)
    for kind in PARTS:
        yield from kind.findings(evidence)
    yield from _gradient(evidence)
    yield from _noise(evidence)


def recent(evidence: Evidence, name: str) -> float | None:
    """The median of a metric over the recent steps; None where there is none."""
    series = evidence.series(name)[-RECENT:]
    return statistics.median(series) if series else None


def _not_finite(evidence: Evidence) -> Iterator[Finding]:
    for name in ("loss", "grad_norm", "entropy", "kl_old"):
        values = [value for step in evidence.steps for key, value in step.items() if key.split("/")[-1] == name]
        if any(value is None or not math.isfinite(value) for value in values):  # a store keeps NaN as null
            yield problem(
                "not_finite",
                f"The metric {name} became infinite or NaN.",
                "Lower learning_rate, set max_grad_norm=1, and resume from a checkpoint before it; with float16 take "
                "bfloat16.",
                metric=name,
            )
            return


def _rate(evidence: Evidence) -> Iterator[Finding]:
    rates = evidence.series("learning_rate")
    falls = evidence.settings.get("schedule", "constant") != "constant"
    zero = rates and (max(rates) == 0 or (rates[-1] == 0 and not falls))
    if (zero and not evidence.settings.get("critic_warmup")) or evidence.settings.get("learning_rate") == 0:
        yield problem(
            "learning_rate_zero",
            "The learning rate is 0, so nothing is learned.",
            "Leave learning_rate out to take the default for the model's size.",
        )


def _far_off(evidence: Evidence) -> Iterator[Finding]:
    """A rate that is far from what models of this size and kind learn with, where the reward does not rise."""
    rate, shape, rewards = evidence.settings.get("learning_rate"), _shape(evidence.settings), evidence.series("reward")
    if not rate or shape is None or len(rewards) < 2 * FEW or evidence.solved or has_risen(rewards):
        return
    usual = shape.learning_rate(adapter=evidence.settings.get("lora_rank") is not None)
    if not usual / FAR_OFF <= rate <= usual * FAR_OFF:
        times = f"{usual / rate:.0f} times below" if rate < usual else f"{rate / usual:.0f} times above"
        yield warning(
            "rate_far_off",
            f"The learning rate {rate:g} is {times} what suits a model of this size, and the reward has not risen.",
            f"Leave learning_rate out, or set {usual:g}.",
            learning_rate=rate,
            usual=usual,
        )


def _shape(settings: Mapping[str, Any]) -> ModelShape | None:
    """The sizes of the run's model, where that is on this machine."""
    model = settings.get("model")
    if not isinstance(model, str) or not (model in shipped_models() or Path(model).is_dir()):
        return None
    try:
        return read_shape(model)
    except ModelError:
        return None


def _no_updates(evidence: Evidence) -> Iterator[Finding]:
    updates = evidence.series("updates")[-RECENT:]
    idle = sum(value == 0 for value in updates)
    if len(updates) < 2 or idle * 2 < len(updates) or evidence.solved:
        return
    # A run that has learned has ever fewer groups that differ: to know, and no fault.
    rewards = evidence.series("reward")
    learned = len(rewards) >= WATCHED_STEPS and has_risen(rewards)
    yield (note if learned else problem)(
        "no_updates",
        f"{idle} of the last {len(updates)} steps taught nothing: in each group all siblings earned the same, or their "
        "advantages were all 0.",
        "Take tasks that the model solves now and then, give partial rewards, or take a larger group_size.",
        idle_steps=idle,
        steps=len(updates),
    )


def _trend(evidence: Evidence) -> Iterator[Finding]:
    if evidence.solved or not evidence.steps:
        return
    lowest, highest = min(evidence.rewards, default=0.0), max(evidence.rewards, default=0.0)
    rewards = evidence.series("reward")
    found = fallen(rewards, lowest, highest) or not_risen(rewards, lowest, highest, evidence.steps[-1])
    if found is not None:
        yield found


def _validation(evidence: Evidence) -> Iterator[Finding]:
    series = zip(*(evidence.series(name) for name in ("val_reward", "val_low", "val_high")), strict=False)
    validated = [Validated(*one) for one in series]
    if has_overfitted(evidence.series("reward"), validated, evidence.spread):
        best, last = max(v.reward for v in validated), validated[-1].reward
        yield warning(
            "overfitting",
            f"Training reward rises, and validation reward has fallen from {best:.3g} to {last:.3g}. {FALSE_ALARMS}",
            "Take the checkpoint that validated best; train on more tasks, for fewer epochs, or with kl_coef=0.01.",
            best=best,
            last=last,
        )


def _clipping(evidence: Evidence) -> Iterator[Finding]:
    clipped = recent(evidence, "clip_fraction")
    if clipped is not None and clipped > CLIPPED:
        yield warning(
            "clipping",
            f"{clipped:.0%} of the tokens are clipped and teach nothing: the updates go too far.",
            "Lower learning_rate to a third, or take fewer minibatches and update_epochs.",
            clip_fraction=clipped,
        )


def _entropy(evidence: Evidence) -> Iterator[Finding]:
    entropies = evidence.series("entropy")
    if len(entropies) < FEW or evidence.solved:
        return
    start, now = statistics.mean(entropies[:2]), statistics.median(entropies[-FEW:])
    rewards = evidence.series("reward")
    rising = len(rewards) > 2 * FEW and statistics.mean(rewards[-FEW:]) > statistics.mean(rewards[:FEW]) + 0.1
    if start > 0 and now < 0.1 * start and now < 0.02 and not rising:
        yield problem(
            "entropy_collapse",
            f"The model says the same every time: entropy fell from {start:.3g} to {now:.2g} nats per token, and the "
            "reward is not high.",
            "Go back to a checkpoint before it, and set entropy_coef=0.003 or clip_high=0.3; a lower learning_rate "
            "helps "
            "as well.",
            first=start,
            last=now,
        )
    elif start > 0 and now > 3 * start and now > 1.0 and not rising:
        yield problem(
            "entropy_explosion",
            f"The model is falling apart: entropy rose from {start:.3g} to {now:.2g} nats per token.",
            "Go back to a checkpoint before it, lower learning_rate, and leave entropy_coef out.",
            first=start,
            last=now,
        )


def _moved(evidence: Evidence) -> Iterator[Finding]:
    kl, halvings = recent(evidence, "kl_old"), evidence.series("halvings")[-RECENT:]
    halved = sum(value > 0 for value in halvings)
    if kl is not None and kl > KL_LARGE:
        yield warning(
            "steps_too_large",
            f"The weights that learn are {kl:.2g} nats per token from those that sampled.",
            "Lower learning_rate, or take fewer minibatches, update_epochs or max_staleness.",
            kl_old=kl,
        )
    elif len(halvings) >= FEW and halved * 2 >= len(halvings):
        yield warning(
            "steps_too_large",
            f"{halved} of the last {len(halvings)} updates were cut back to max_kl: the learning rate asks for more.",
            "Lower learning_rate to a third.",
            halved_steps=halved,
        )


def _weights(evidence: Evidence) -> Iterator[Finding]:
    mean, zero = recent(evidence, "correction_mean"), recent(evidence, "corrected_to_zero")
    effective = recent(evidence, "effective_sample_size")
    stale = (mean is not None and not 0.5 <= mean <= 2.0) or (zero or 0) > 0.3 or (effective or 1) < 0.3
    if stale:
        yield warning(
            "stale_samples",
            "Much of what is learned was sampled by weights that are too old: importance weights average "
            f"{1 if mean is None else mean:.2g}, and {zero or 0:.0%} of the tokens are left out.",
            "Lower max_staleness or raise quorum, so that learning waits for fresher rollouts.",
            correction_mean=mean,
            corrected_to_zero=zero,
            effective_sample_size=effective,
        )


def _gap(evidence: Evidence) -> Iterator[Finding]:
    short = evidence.settings.get("dtype", "float32") not in ("float32", "float64")
    shape = _shape(evidence.settings)
    usual = 0.5 if short else LOGPROB_GAP if shape is None else shape.logprob_gap
    limit = evidence.settings.get("max_logprob_gap") or usual
    gaps = [*evidence.series("logprob_gap_max")[-RECENT:], *evidence.series("sync_gap")[-RECENT:]]
    if gaps and max(gaps) > limit / 2:
        yield warning(
            "engine_gap",
            f"Engine and learner disagree about the same tokens by up to {max(gaps):.2g} in their log-probs (limit "
            f"{limit:g}).",
            "Take dtype='float32' for both if the model is small; otherwise set correction='token', which weighs the "
            "difference out.",
            largest=max(gaps),
            limit=limit,
        )


def _gradient(evidence: Evidence) -> Iterator[Finding]:
    norms = [n for n in evidence.series("grad_norm") if math.isfinite(n)]
    if len(norms) < 2 * FEW:
        return
    usual, last = statistics.median(norms), max(norms[-FEW:])
    if usual > 0 and last > 20 * usual and last > 5 * max(norms[:-FEW]):  # what is solved leaves a gradient of nothing
        yield warning(
            "gradient_spike",
            f"The gradient's norm jumped to {last:.2g}, {last / usual:.0f} times what is usual in this run.",
            "Look at the rollouts of that step (agl show --step); lower max_grad_norm or learning_rate.",
            last=last,
            median=usual,
        )
    elif usual < 1e-7 and any(evidence.series("updates")):
        yield problem(
            "no_gradient",
            f"Updates are made, and the gradient is nothing (norm {usual:.1g}).",
            "Lay siblings side by side (agl show RUN --group ID): are rewards nearly equal? Or do all ratios lie "
            "outside the clip range?",
            median=usual,
        )


def signal_to_noise(evidence: Evidence) -> float | None:
    """|G|² over tr Σ/B, each averaged over the recent measurements first; None where there are too few.

    See `learner.noise`. At 1 half of what an update follows is noise.
    """
    signals = evidence.series("gradient_signal")[-RECENT:]
    noises = evidence.series("gradient_noise")[-RECENT:]
    noise = statistics.mean(noises) if len(noises) >= MEASURED else 0.0
    return statistics.mean(signals) / noise if noise > 0 else None


def _noise(evidence: Evidence) -> Iterator[Finding]:
    ratio = signal_to_noise(evidence)
    if ratio is None or ratio > NOISY or evidence.solved:
        return
    if not may_stand_still(evidence.series("reward")):
        return  # it learns all the same, or nobody knows yet
    cosine = statistics.mean(evidence.series("gradient_cosine")[-RECENT:])
    yield warning(
        "gradient_noise",
        f"The gradient is mostly noise: two halves of a step point in directions with a cosine of {cosine:.2f}, and "
        f"its signal is {max(ratio, 0.0):.2f} of its noise.",
        "Take four times the tasks_per_step, or tasks whose rollouts differ more often; a lower learning_rate averages "
        "over more steps.",
        signal_to_noise=ratio,
        gradient_cosine=cosine,
    )
