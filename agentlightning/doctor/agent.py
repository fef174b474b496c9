"""The doctor's look at an agent before it is trained: what a handful of its rollouts say, and what training will take.

`examine` is pure; the rollouts are run by whoever asks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.doctor.breaks import Decode
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.template import Template
from agentlightning.doctor.why import diagnose
from agentlightning.models.shape import BYTES_OF, ModelShape
from agentlightning.runner.blocking import INSTEAD
from agentlightning.types.finding import Diagnosis, Finding, counted, note, problem, share, warning, worst_first

SLOW_STEP = 1800.0
"""Projected seconds of a step's sampling that are worth a word."""
MANY_CALLS = 10
"""Calls of the model after which a rollout that is not at its end rather has none than waits for something."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the user is about to train, as far as it is known: the model and its settings."""

    rollouts_per_step: int = 128
    concurrency: int = 64
    steps: int | None = None
    shape: ModelShape | None = None
    dtype: str = "float32"
    adapter: bool = False
    memory: int | None = None
    """Bytes that there are for the model."""
    max_context: int | None = None


def examine(
    evidence: Evidence,
    plan: Plan,
    *,
    blocked: Sequence[str] = (),
    unfinished: int = 0,
    phases: Mapping[str, int] | None = None,
    calls_so_far: Sequence[int] = (),
    decode: Decode | None = None,
    template: Template | None = None,
) -> Diagnosis:
    """What is wrong with an agent, and what a step of training it will take.

    blocked: what was said of async code that blocks its event loop.
    unfinished: rollouts that did not come to their end in the time there was.
    phases: how many of them were where, as far as that is known (`algorithm.stall.Phase`).
    calls_so_far: of those that began, how often each had called the model.
    """
    found = diagnose(evidence, decode, template)
    measured = {**found.measured, **costs(evidence, plan)}
    findings = worst_first(
        [
            *(f for f in found.findings if f.code not in ("solved", "nothing_ran")),
            *_slow(evidence, unfinished, phases or {}, calls_so_far),
            *_costly(measured, plan),
            *_blocking(blocked),
        ]
    )
    measured = {name: value for name, value in measured.items() if name not in _OF_A_RUN}
    return Diagnosis(verdict=_verdict(evidence, findings), findings=findings, measured=measured)


_OF_A_RUN = ("steps", "reward_first", "reward_last", "dropped")


def _verdict(evidence: Evidence, findings: Sequence[Finding]) -> str:
    problems = [f for f in findings if f.severity == "problem"]
    if problems:
        return f"Do not train it yet. {problems[0].words} First thing to try: {problems[0].fix}"
    warnings = [f for f in findings if f.severity == "warning"]
    if warnings:
        return f"It can be trained, and would do better. {warnings[0].words} First thing to try: {warnings[0].fix}"
    return (
        f"The agent is ready: {counted(len(evidence.episodes), 'rollout')} ran, with nothing to say against "
        f"{'it' if len(evidence.episodes) == 1 else 'them'}."
    )


def costs(evidence: Evidence, plan: Plan) -> dict[str, Any]:
    """Seconds of a rollout and, at this pace, of a step; bytes for the weights and the longest row."""
    attempts = [e.attempt for e in evidence.episodes if e.attempt is not None]
    seconds = [a.end_time - a.start_time for a in attempts if a.end_time is not None]
    calls = [c for e in evidence.episodes for c in e.calls]
    longest = max((len(c.prompt_ids) + len(c.response_ids) for c in calls), default=0)
    found: dict[str, Any] = {}
    if seconds:
        waves = math.ceil(plan.rollouts_per_step / plan.concurrency)
        found["seconds_per_rollout"] = statistics.median(seconds)
        found["slowest_rollout_seconds"] = max(seconds)
        found["projected_seconds_per_step"] = waves * statistics.mean(seconds)
    if plan.shape is not None and longest:
        row = plan.shape.activation_numbers(longest) * BYTES_OF[plan.dtype]
        found["longest_row_tokens"] = longest
        found["model_bytes"] = plan.shape.training_bytes(plan.dtype, adapter=plan.adapter)
        found["longest_row_bytes"] = row
    return found


def _slow(
    evidence: Evidence, unfinished: int, phases: Mapping[str, int], calls_so_far: Sequence[int]
) -> Iterator[Finding]:
    if unfinished:
        total = unfinished + len(evidence.episodes)
        where = "; ".join(f"{count} {phase}" for phase, count in phases.items())
        cause = "See where it waits: a tool or a service that does not answer needs a timeout."
        if (calls := statistics.median(calls_so_far or [0])) >= MANY_CALLS:
            where = f"{where}; {calls:g} calls of the model each by then"
            cause = "Give an episode an end: a limit of its turns, which an environment has as an option of its own."
        yield (warning if evidence.episodes else problem)(
            "too_slow",
            f"{share(unfinished, total)} rollouts did not come to their end in the time the doctor had"
            f"{f' ({where})' if where else ''}.",
            f"{cause} If it is meant to take so long, give the doctor more (--seconds).",
            phases=dict(phases),
        )
    elif not evidence.episodes:
        yield problem(
            "too_slow",
            "No rollout began in the time the doctor had: loading the model took all of it.",
            "Give the doctor more time (--seconds), or a smaller model to ask (--model).",
        )


def _costly(measured: dict[str, Any], plan: Plan) -> Iterator[Finding]:
    step = measured.get("projected_seconds_per_step", 0.0)
    if step > SLOW_STEP:
        yield warning(
            "slow_steps",
            f"A step of {counted(plan.rollouts_per_step, 'rollout')} will take about {step / 60:.0f} minutes to "
            "sample.",
            "Raise concurrency or n_runners if the agent mostly waits; else take smaller steps, or max_staleness=1.",
            seconds=step,
        )
    need = measured.get("model_bytes", 0) + measured.get("longest_row_bytes", 0)
    if plan.memory is not None and need > plan.memory:
        yield problem(
            "does_not_fit",
            f"The model and its longest row ({measured['longest_row_tokens']} tokens) take {need / 2**30:.1f} GiB to "
            f"train, and there are {plan.memory / 2**30:.1f} GiB.",
            "Set lora_rank=16, dtype='bfloat16' or gradient_checkpointing=True, or a smaller max_context.",
            bytes=need,
            there=plan.memory,
        )
    longest, limit = measured.get("longest_row_tokens", 0), plan.max_context
    if limit and longest > 0.9 * limit:
        yield note(
            "near_the_limit",
            f"The longest call has {longest} tokens, of the {limit} of max_context.",
            "",
            tokens=longest,
        )


def _blocking(blocked: Sequence[str]) -> Iterator[Finding]:
    if blocked:
        yield warning("blocks_the_loop", blocked[0].removesuffix(f" {INSTEAD}"), INSTEAD, times=len(blocked))
