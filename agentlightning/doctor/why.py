"""Why is it not learning? What a run's evidence comes to: findings, numbers, and a verdict with the first thing to try.

`why` reads a store, also of a run that goes on; `diagnose` is the pure part.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from agentlightning.algorithm.verdicts import FALSE_ALARMS, has_risen
from agentlightning.doctor.breaks import Decode, break_findings, lost_tokens
from agentlightning.doctor.evidence import Evidence, gather
from agentlightning.doctor.in_calls import call_findings
from agentlightning.doctor.in_rollouts import difficulty, outcomes, rollout_findings
from agentlightning.doctor.in_steps import FEW, recent, signal_to_noise, step_findings
from agentlightning.doctor.in_texts import length_pays, paid_without_tools, repeating, sameness, text_findings
from agentlightning.doctor.template import Template, template_findings
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.types import Outcome, Run
from agentlightning.types.finding import Diagnosis, Finding, counted, note, worst_first

_OF_STEPS = (
    *("clip_fraction", "entropy", "kl_old", "kl_reference", "grad_norm", "staleness"),
    *("correction_mean", "corrected_to_zero", "effective_sample_size", "ratio_min", "ratio_max"),
    *("logprob_gap_max", "kl_engine", "sync_gap", "learning_rate"),
)
"""Metrics whose recent median is part of what was measured."""
_NO_DIFFERENCE = ("no_updates", "not_rising", "no_gradient", "no_variance", "too_hard", "too_easy")
_SHADOWS = {
    "constant_reward": {*_NO_DIFFERENCE, "same_answers"},
    "learning_rate_zero": {"not_rising", "no_gradient"},
    "gradient_noise": {"not_rising"},
    "rate_far_off": {"not_rising", "gradient_noise"},
    "never_called": {"no_reward", "rollouts_fail", "not_rising", "constant_reward"},
    "calls_not_captured": {"no_reward", "rollouts_fail", "not_rising", "constant_reward"},
    "too_hard": {"no_updates", "not_rising"},
    "too_easy": {"no_updates", "not_rising"},
    "no_variance": {"no_updates", "not_rising"},
    "reward_ignores_answer": {"no_updates", "not_rising"},
    "greedy_sampling": {*_NO_DIFFERENCE, "constant_reward"},
    "calls_fail_unseen": {*_NO_DIFFERENCE, "constant_reward", "never_called", "calls_not_captured"},
    "rollouts_fail": {"attempts_repeated"},
    "same_answers": {"no_updates", "no_variance", "too_hard", "too_easy"},
    "tool_calls_unparsed": {"reward_without_tools"},
    "not_finite": {"gradient_spike", "reward_fell"},
}
"""Findings that follow from another one, and are left out beside it."""


async def why(store: LightningStore, run_id: str | None = None, *, decode: Decode | None = None) -> Diagnosis:
    """What is wrong with a run, or that nothing is. None: the last run in the store.

    `decode` turns token ids into text: with it breaks of token histories are shown and told apart by what differs.

    Raises ConfigError when there is no such run, and none at all.
    """
    run = await find_run(store, run_id)
    return diagnose(await gather(store, run), decode)


async def find_run(store: LightningStore, run_id: str | None = None) -> Run | None:
    """The run of this id, else the last one; None for a store without runs. Raises ConfigError for an unknown id."""
    if run_id is not None:
        run = await store.get_run_by_id(run_id)
        if run is None:
            known = ", ".join(r.run_id for r in await store.query_runs(limit=10)) or "none"
            raise ConfigError(f"There is no run '{run_id}' in this store; there are: {known}.")
        return run
    runs = await store.query_runs(sort_by="start_time", sort_order="desc", limit=1)
    return runs[0] if len(runs) else None


def diagnose(evidence: Evidence, decode: Decode | None = None, template: Template | None = None) -> Diagnosis:
    """Findings, numbers and the verdict. `decode` and `template` are those of the run's model, where they are known."""
    found = [
        *rollout_findings(evidence),
        *step_findings(evidence),
        *text_findings(evidence),
        *call_findings(evidence, decode),
        *break_findings(evidence, decode),
        *template_findings(evidence, template, decode),
    ]
    hidden = {code for f in found for code in _SHADOWS.get(f.code, ())}
    findings = worst_first([f for f in found if f.code not in hidden])
    if evidence.solved and len(evidence.steps) >= FEW:
        findings.append(note("solved", "The last rollouts earn nearly all that any rollout of the run has earned."))
    return Diagnosis(
        verdict=_verdict(evidence, findings),
        findings=findings,
        measured=measure(evidence),
        run_id=evidence.run.run_id if evidence.run else None,
    )


def _verdict(evidence: Evidence, findings: Sequence[Finding]) -> str:
    worst = next((f for f in findings if f.fix), None)
    if worst is not None:
        more = sum(bool(f.fix) for f in findings) - 1
        others = "" if not more else f" ({more} more below.)"
        return f"{worst.words} First thing to try: {worst.fix}{others}"
    rewards = evidence.series("reward")
    if evidence.supervised and evidence.steps:
        return _of_examples(evidence)
    if not evidence.steps:
        return (
            "Nothing is wrong with the rollouts that were read." if evidence.episodes else "Nothing has happened yet."
        )
    if any(f.code == "solved" for f in findings):
        return f"It has learned: the reward is {rewards[-1]:.3g}, near the highest seen. Harder tasks would teach more."
    if len(rewards) < 2 * FEW:
        return f"Nothing is wrong so far. {counted(len(rewards), 'step is', 'steps are')} too few to judge by."
    first, last = statistics.mean(rewards[:FEW]), statistics.mean(rewards[-FEW:])
    if has_risen(rewards):
        return (
            f"It is learning: the reward went from {first:.3g} to {last:.3g} in "
            f"{counted(len(rewards), 'step')}. {FALSE_ALARMS}"
        )
    return (
        f"Nothing is wrong, and the reward has not visibly risen yet ({first:.3g} to {last:.3g}): give it more steps."
    )


def _of_examples(evidence: Evidence) -> str:
    """The verdict on a run that learned examples: how well it knows them, and how well it does."""
    losses, validated = evidence.series("loss"), evidence.series("val_reward")
    words = f"It learns the examples: the loss went from {losses[0]:.3g} to {losses[-1]:.3g} nats per token"
    if len(losses) < 2 or losses[-1] >= losses[0]:
        words = f"The loss has not fallen yet ({losses[0]:.3g} to {losses[-1]:.3g} nats per token): give it more steps"
    if len(validated) > 1:
        words += f". The validation reward went from {validated[0]:.3g} to {validated[-1]:.3g}"
    return f"{words}."


def _part(some: Sequence[Any], of: Sequence[Any]) -> float | None:
    return len(some) / len(of) if of else None


def measure(evidence: Evidence) -> dict[str, Any]:
    """The numbers behind the findings, whether anything is wrong with them or not."""
    episodes, groups = evidence.episodes, evidence.groups
    flat = sum(evidence.is_flat(group) for group in groups)
    calls = [c for e in episodes for c in e.calls]
    rewards, losses = evidence.series("reward"), evidence.series("loss")
    found: dict[str, Any] = {
        "steps": len(evidence.steps),
        "reward_first": statistics.mean(rewards[:FEW]) if rewards else None,
        "reward_last": statistics.mean(rewards[-FEW:]) if rewards else None,
        "rollouts_read": len(episodes),
        "outcomes": outcomes(episodes),
        "groups": len(groups),
        "flat_groups": flat / len(groups) if groups else None,
        "dropped": int(sum(evidence.series("dropped"))),
        "failed": _part([e for e in episodes if not e.good], episodes),
        "truncated": _part([e for e in episodes if e.outcome is Outcome.TRUNCATED], episodes),
        "masked": _part(evidence.masked, episodes),
        "reward_by_difficulty": difficulty(groups, min(evidence.rewards), max(evidence.rewards)) if groups else {},
        "same_answers": sameness(groups),
        "repeated_phrases": _part(*repeating(episodes)),
        "length_reward_correlation": length_pays(groups),
        "rewarded_without_tools": _part(*paid_without_tools(evidence, episodes)),
        "calls_per_rollout": len(calls) / len(episodes) if episodes else None,
        "sampled_tokens_per_rollout": statistics.mean(e.sampled_tokens for e in episodes) if episodes else None,
        "longest_call_tokens": max((len(c.prompt_ids) + len(c.response_ids) for c in calls), default=None),
    }
    if evidence.supervised and losses:
        found |= {"loss_first": losses[0], "loss_last": losses[-1]}
    found["signal_to_noise"] = signal_to_noise(evidence)
    found |= lost_tokens(evidence)
    return found | {name: value for name in _OF_STEPS if (value := recent(evidence, name)) is not None}
