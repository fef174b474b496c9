"""Stalled steps: a step in which nothing at all happened for its deadline names the rollouts it waits for, and goes on.

What counts as happening: a rollout that ends, an attempt that begins, a call or a span that is stored. Which rollout is
stuck where is read from the store and from the gateway's open requests; nothing is asked of the agents.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import PositiveFloat

from agentlightning.algorithm.base import TrainingContext
from agentlightning.arguments import SettingsGroup
from agentlightning.errors import AgentError
from agentlightning.store.base import LightningStore
from agentlightning.types import FINISHED_ROLLOUT, AttemptedRollout, Rollout, RolloutStatus, Span
from agentlightning.types.finding import counted
from agentlightning.types.names import ANNOTATION, CALL_ID, REWARD

LOOKS = 6
"""How often within the deadline it is looked whether something happened."""
NAMED = 5
"""Stuck rollouts that are named."""
_OPEN = tuple(status for status in RolloutStatus if status not in FINISHED_ROLLOUT)

Phase = Literal[
    "waiting for a runner",
    "claimed, nothing recorded yet",
    "waiting for the model",
    "in a tool",
    "in the agent's own code",
    "grading",
    "writing its end",
]


@dataclass(frozen=True, kw_only=True)
class StallRule(SettingsGroup):
    """When a step is stalled, and what becomes of it."""

    seconds: PositiveFloat = 900.0
    """Seconds without any activity after which a step counts as stalled; the run names its open rollouts and their
    phase."""
    action: Literal["wait", "cancel", "stop"] = "wait"
    """What to do with a stalled step: keep waiting, continue without the open rollouts, or end the run."""


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rollout that a stalled step waits for."""

    rollout_id: str
    phase: Phase
    seconds: float
    """Since the last thing that was heard of it."""
    last: str
    """What that was."""
    host: str
    """The runner that has it."""
    task: str

    def __str__(self) -> str:
        return (
            f"{self.rollout_id} on {self.host}: {self.phase} for {self.seconds:.0f} s; last heard: {self.last}; "
            f"task {self.task}"
        )


async def watch_for_stalls(
    context: TrainingContext, ids: Sequence[str], rule: StallRule, what: str, cancel: Callable[[], Awaitable[None]]
) -> None:
    """Look now and then until cancelled. `what` names the step; `cancel` gives up its open rollouts.

    Raises AgentError with the stuck rollouts where the rule says so.
    """
    seen, since = await _progress(context.store), time.monotonic()
    while True:
        await asyncio.sleep(rule.seconds / LOOKS)
        now = await _progress(context.store)
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= rule.seconds:
            found = await find_stuck(context, ids)
            words = describe(found, rule, what)
            context.reporter.event("stall", {"step": what, "stuck": [asdict(one) for one in found]})
            if rule.action == "stop":
                raise AgentError(words)
            context.reporter.warn(words)
            if rule.action == "cancel":
                await cancel()
            since = time.monotonic()  # said again only when it stalls for as long again


def describe(found: Sequence[Stuck], rule: StallRule, what: str) -> str:
    """The stuck rollouts in words, what becomes of them, and what to look at."""
    lines = [
        f"{what}: nothing has happened for {rule.seconds:g} s. "
        f"{counted(len(found), 'rollout is', 'rollouts are')} open:"
    ]
    lines += [f"  {one}" for one in found[:NAMED]]
    if len(found) > NAMED:
        lines.append(f"  and {len(found) - NAMED} more")
    phases = {one.phase for one in found}
    if len(phases) == 1 and found:
        lines.append(_ADVICE[found[0].phase])
    goes_on = {
        "wait": "It goes on waiting; on_stall='cancel' would go on without them.",
        "cancel": "They are cancelled and left out of the update (on_stall='cancel').",
        "stop": "The run ends here (on_stall='stop'); its last checkpoint is good.",
    }
    return "\n".join([*lines, goes_on[rule.action]])


_ADVICE: Mapping[Phase, str] = {
    "waiting for a runner": "Nobody claims them: start runners (agl runner), or raise concurrency.",
    "claimed, nothing recorded yet": "The agent does something before its first call: give it a timeout.",
    "waiting for the model": "The engine answers none of them: look at the log of the model process, or the provider.",
    "in a tool": "A tool does not come back: give it a timeout.",
    "in the agent's own code": "The agent does not go on after an answer: does it wait for a lock, a queue, a service?",
    "grading": "The grader does not come back: give it a timeout.",
    "writing its end": "The store does not take what runners write: look at its log.",
}


async def find_stuck(context: TrainingContext, ids: Sequence[str]) -> list[Stuck]:
    """The rollouts that are open, those that were silent the longest first."""
    page = await context.store.query_rollouts(rollout_id_in=list(ids), status_in=_OPEN)
    found = [await _look_at(context, rollout) for rollout in page]
    return sorted(found, key=lambda one: -one.seconds)


async def _look_at(context: TrainingContext, rollout: Rollout) -> Stuck:
    task = json.dumps(rollout.input, default=repr, ensure_ascii=False)[:80]
    if not isinstance(rollout, AttemptedRollout) or rollout.status in (RolloutStatus.QUEUING, RolloutStatus.REQUEUING):
        waited = time.time() - rollout.start_time
        return Stuck(rollout.rollout_id, "waiting for a runner", waited, "it was enqueued", "no runner", task)
    attempt = rollout.attempt
    page = await context.store.query_spans(
        rollout.rollout_id, attempt.attempt_id, sort_by="sequence_id", sort_order="desc", limit=1
    )
    span = page[0] if len(page) else None
    waits = context.open_calls(rollout.rollout_id, attempt.attempt_id) > 0
    last_sign = attempt.start_time if span is None else span.end_time or span.start_time or attempt.start_time
    last = "it was claimed" if span is None else f"{span.name} {span.attributes.get(CALL_ID, '')}".strip()
    host = attempt.worker_id or "a runner without a name"
    return Stuck(rollout.rollout_id, phase_of(span, waits_for_model=waits), time.time() - last_sign, last, host, task)


def phase_of(last: Span | None, *, waits_for_model: bool) -> Phase:
    """The phase of an attempt: its last span, and whether the gateway has an open request of it."""
    if waits_for_model:
        return "waiting for the model"
    if last is None:
        return "claimed, nothing recorded yet"
    if CALL_ID in last.attributes:
        reasons = last.attributes.get("gen_ai.response.finish_reasons") or ()
        return "in a tool" if "tool_calls" in reasons else "in the agent's own code"
    if last.name == REWARD:
        return "writing its end"
    if last.name == ANNOTATION and any(key.startswith("program") for key in last.attributes):
        return "grading"  # the program has ended
    return "in the agent's own code"


async def _progress(store: LightningStore) -> tuple[object, ...]:
    """What grows or changes whenever anything happens."""
    counts = await store.statistics()
    return (
        counts["total_attempts"],
        counts["total_spans"],
        counts["total_calls"],
        tuple(counts["rollouts"].items()),
        tuple(counts["attempts"].items()),
    )
