"""Runs as a store holds them, written down by hand: rollouts with calls and rewards, and a metrics row per step."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentlightning.store.base import LightningStore
from agentlightning.types import (
    AttemptStatus,
    CallInfo,
    CallRecord,
    Outcome,
    RolloutMode,
    RolloutStatus,
    Run,
    RunEvent,
    Segment,
    Span,
    VersionRun,
)
from agentlightning.types.call import Divergence
from agentlightning.types.names import CALL_ID
from agentlightning.types.reward import reward_attributes

_numbers = itertools.count()
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


@dataclass(frozen=True, kw_only=True)
class Said:
    """One model call."""

    prompt: Sequence[int] = (1, 2, 3)
    ids: Sequence[int] | None = None
    """None: three tokens that no other call has."""
    text: str = "The answer is 4."
    tool: Mapping[str, Any] | None = None
    """Arguments of a call of the tool `calc`."""
    tools: bool = False
    results: Sequence[str] = ()
    """Tool results in its prompt."""
    history: Sequence[str] = ()
    """Earlier answers of the model in its prompt."""
    cause: str | None = None
    temperature: float = 1.0
    asked: float | None = None
    """The temperature that the agent asked for."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else it asked for."""
    trained: bool = True
    dialect: str = "chat"
    finish_reason: str = "stop"
    answers: int = 1
    """How many its request asks for."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """One rollout."""

    reward: float | None = None
    calls: Sequence[Said] = (Said(),)
    outcome: Outcome = Outcome.OK
    error: str | None = None
    refused: str | None = None
    spans: Sequence[Mapping[str, Any]] = ()
    """Attributes of spans that a framework recorded."""
    failed_calls: Sequence[str] = ()
    """Why calls failed of which nobody was told, before the others."""
    tried: Sequence[str] = ()
    """Why earlier attempts failed."""
    task: Any = 0


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A run: groups of siblings, in the order in which they were sampled, and the metrics of its steps."""

    groups: Sequence[Sequence[Told]] = ()
    steps: Sequence[Mapping[str, Any]] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


async def write(store: LightningStore, recording: Recording) -> str:
    """Store it; returns the run's id."""
    run = Run(run_id=f"run-{next(_numbers)}", algorithm="GRPO", settings=dict(recording.settings))
    await store.begin_run(run)
    for number, group in enumerate(recording.groups):
        for told in group:
            await _rollout(store, run.run_id, f"g{number}", number // 8 + 1, told)
    events = [
        RunEvent(run_id=run.run_id, event_id=f"step-{n}", kind="step", time=n, step=n, data={"step": n, **metrics})
        for n, metrics in enumerate(recording.steps, 1)
    ]
    await store.add_run_events(events)
    return run.run_id


async def _rollout(store: LightningStore, run_id: str, group: str, step: int, told: Told) -> None:
    claim = await store.start_rollout(
        told.task, RolloutMode.TRAIN, metadata={"group": group, "step": step}, run_id=run_id
    )
    where: Any = {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt.attempt_id}
    for error in told.tried:
        await store.update_attempt(**where, status=AttemptStatus.FAILED, outcome=Outcome.INFRA_ERROR, error=error)
        claim = await store.start_attempt(claim.rollout_id)
        where["attempt_id"] = claim.attempt.attempt_id
    asked = [(said, n, choice) for n, said in enumerate(told.calls) for choice in range(said.answers)]
    await store.add_calls([_call(said, n, choice, **where) for said, n, choice in asked])
    spans = [Span.from_attributes(name="chat", attributes=dict(a), **where) for a in told.spans]
    spans += [_failure(text, n, **where) for n, text in enumerate(told.failed_calls)]
    if told.refused:
        refusal = Span.from_attributes(name="chat", attributes={"error.type": "refused"}, **where)
        spans.append(
            refusal.model_copy(update={"status": refusal.status.model_copy(update={"description": told.refused})})
        )
    if told.reward is not None:
        spans.append(
            Span.from_attributes(name="agentlightning.reward", attributes=reward_attributes(told.reward), **where)
        )
    await store.add_many_spans(spans)
    good = told.outcome in (Outcome.OK, Outcome.TRUNCATED)
    status = AttemptStatus.SUCCEEDED if good else AttemptStatus.FAILED
    await store.update_attempt(**where, status=status, outcome=told.outcome, error=told.error)
    if told.outcome is Outcome.INFRA_ERROR:  # it would be tried again
        await store.update_rollout(claim.rollout_id, status=RolloutStatus.FAILED)


def _failure(text: str, number: int, **where: Any) -> Span:
    """A call that another provider did not answer."""
    attributes = {CALL_ID: f"failed-{number}", "gen_ai.request.model": "judge", "gen_ai.operation.name": "chat"}
    span = Span.from_attributes(name="chat judge", attributes=attributes, **where)
    return span.model_copy(
        update={"status": span.status.model_copy(update={"status_code": "ERROR", "description": text})}
    )


def _call(said: Said, number: int, choice: int, *, rollout_id: str, attempt_id: str) -> CallRecord:
    response_id, unique = f"{attempt_id}-{number}", next(_numbers)
    call_id = f"{response_id}:{choice}" if choice else response_id
    ids = [unique, unique + 1, unique + 2] if said.ids is None else list(said.ids)
    logprobs = np.full(len(ids), -1.0, dtype=np.float32)
    info = CallInfo(
        call_id=call_id,
        response_id=response_id,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        choice=choice,
        policy="policy" if said.trained else "judge",
        trained=said.trained,
        agent=None,
        parent_call_id=None,
        model="policy",
        dialect=said.dialect,
        finish_reason=said.finish_reason,
        start_time=float(number),
        end_time=number + 0.5,
        temperature=said.temperature,
        asked={**said.settings, **({} if said.asked is None else {"temperature": said.asked})},
        divergence=Divergence(0, 1, said.cause) if said.cause else None,
    )
    prompt = Segment(f"{call_id}/p", None, 0, np.array(said.prompt, dtype=np.int32))
    response = Segment(
        f"{call_id}/r",
        f"{call_id}/p",
        len(said.prompt),
        np.array(ids, dtype=np.int32),
        logprobs,
        logprobs,
        (VersionRun(0, 0),) if ids else (),
    )
    return CallRecord(info, f"{call_id}/p", f"{call_id}/r", (prompt, response), _span(said, info))


def _span(said: Said, info: CallInfo) -> Span:
    asked: list[dict[str, Any]] = [{"role": "user", "parts": [{"type": "text", "content": "What is 2 + 2?"}]}]
    asked += [{"role": "assistant", "parts": [{"type": "text", "content": text}]} for text in said.history]
    asked += [
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": r}]} for r in said.results
    ]
    parts: list[dict[str, Any]] = [{"type": "text", "content": said.text}] if said.text else []
    if said.tool is not None:
        parts.append({"type": "tool_call", "id": "c", "name": "calc", "arguments": json.dumps(said.tool)})
    attributes = {
        "gen_ai.operation.name": "chat",
        CALL_ID: info.call_id,
        "gen_ai.input.messages": json.dumps(asked),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": parts, "finish_reason": "stop"}]),
        **({"gen_ai.tool.definitions": json.dumps([TOOL])} if said.tools else {}),
    }
    return Span.from_attributes(
        name="chat policy", attributes=attributes, rollout_id=info.rollout_id, attempt_id=info.attempt_id
    )
