"""A recording: the model calls of an attempt, from which another attempt at the same task is answered first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field

from agentlightning.types.call import Call
from agentlightning.types.names import (
    CALL_ID,
    OPERATION,
    OPERATION_INPUT,
    OPERATION_NAME,
    OPERATION_OUTPUT,
    REPLAYABLE,
    REPLAYABLE_INSIDE,
)
from agentlightning.types.resource import NamedResources, Resource
from agentlightning.types.rollout import GivenRecord
from agentlightning.types.span import Attributes, Span

EditRole = Literal["system", "user", "assistant", "tool"]
"""The role of a message that a fork may edit."""


class RecordedCall(GivenRecord):
    """One answered call, token for token."""

    call_id: str
    policy: str
    """The alias of the policy that answered."""
    prompt_keep: int
    """How many tokens at its beginning the prompt shares with prompt and response of the call before."""
    prompt_ids: list[int]
    """The prompt's tokens behind those."""
    response_ids: list[int]
    logprobs: list[float]
    """Under the distribution that the tokens were drawn from."""
    plain_logprobs: list[float]
    """Under the plain softmax at the same temperature."""
    versions: list[tuple[int, int]]
    """From which token of the response on which weight version sampled."""
    length: bool = False
    """Whether the response was cut off by a limit."""
    used: dict[str, Any] = Field(default_factory=dict)
    """Sampling settings that were used."""
    tool_call_ids: list[str] = Field(default_factory=list)
    """The ids of the calls of tools in the answer."""
    attempt_id: str = ""
    """The attempt that made the call."""
    prompt_segment_id: str = ""
    """The segment of that attempt that the prompt ends with; empty if it is not known."""
    response_segment_id: str = ""
    """The segment that the response ends with; empty if it is not known."""


class RecordedTool(GivenRecord):
    """One call of a function that `agentlightning.replayed` decorates."""

    span_id: str
    """The span that recorded it."""
    inside: str | None = None
    """The span of the decorated function that called this one; None where none did."""
    name: str
    arguments: str
    """A digest of the arguments (`digest_of`)."""
    result: str | None = None
    """JSON text; None where the function has to run again, because it failed or its result could not be recorded."""


class RecordedAttempt(Resource):
    """What makes each rollout that has it a fork: its calls are answered from here as long as it asks the same.

    The gateway compares the tokens of each prompt and the sampling settings. Where the attempt asks something else, or
    the recording has ended, calls are sampled. Answers from here cost no sampling, and are not trained.
    """

    resource_type: str = "recording"
    rollout_id: str
    """The rollout that was recorded."""
    calls: list[RecordedCall] = Field(default_factory=list)
    call_ids: list[str] = Field(default_factory=list)
    """In place of `calls`: those of the rollout with these ids, which the forks' own store has, in this order."""
    diverged: Literal["live", "refuse"] = "live"
    """What happens to a call that is not in the recording before that has ended: it is sampled, or refused."""
    tools: list[RecordedTool] = Field(default_factory=list)
    """Calls of the agent's own tools, in the order in which they began."""
    edits: dict[EditRole, str] = Field(default_factory=dict)
    """The text that a message gets, by its role, in the conversations of calls that are sampled.

    In a conversation's first sampled call it is the first system message, or the last message of another role. Later
    calls have the same message edited.
    """


def recording_in(resources: NamedResources) -> RecordedAttempt | None:
    """The first recording among a rollout's resources, by their names."""
    return next((one for _, one in sorted(resources.items()) if isinstance(one, RecordedAttempt)), None)


FORK_OF = "fork_of"
"""The key of a rollout's metadata with the rollout from one of whose states it goes on."""
STATES, EXPLORED = "branches", "explored"
CONTINUED = (STATES, EXPLORED)
"""The keys of a rollout's metadata with what a run knows of those that went on from it, their ids being `trained`."""


def tool_call_ids_of(spans: Sequence[Span]) -> dict[str, list[str]]:
    """The ids of the calls of tools in each call's answer, by call. A span may be anybody's: what is no message in it
    is passed over."""
    found: dict[str, list[str]] = {}
    for span in spans:
        call_id, output = span.attributes.get(CALL_ID), span.attributes.get("gen_ai.output.messages")
        if isinstance(call_id, str) and isinstance(output, str):
            with suppress(ValueError, RecursionError):
                parts = [part for message in _objects(json.loads(output)) for part in _objects(message.get("parts"))]
                found[call_id] = [str(p.get("id")) for p in parts if p.get("type") == "tool_call"]
    return found


def _objects(value: Any) -> list[dict[str, Any]]:
    values: list[Any] = [*value] if isinstance(value, list) else []
    return [one for one in values if isinstance(one, dict)]


def _is_record(a: Attributes) -> bool:
    texts = [a.get(OPERATION_NAME), a.get(OPERATION_INPUT), a.get(REPLAYABLE_INSIDE, ""), a.get(OPERATION_OUTPUT, "")]
    return REPLAYABLE in a and all(isinstance(text, str) for text in texts)


def digest_of(arguments: str) -> str:
    """What stands for the arguments of a tool's call, given as JSON text, so that a recording does not grow by them."""
    return hashlib.sha256(arguments.encode()).hexdigest()


def recorded_tools(spans: Sequence[Span], following: Sequence[Call] = ()) -> list[RecordedTool]:
    """The calls of decorated tools among an attempt's spans, as they were when the first of the `following` calls of
    the model began; without such a call, all of them.

    A tool that was still at work then is there without its result, so that the calls after it keep their places. A
    span may be anybody's: what is no record of a call is passed over.
    """
    point = min((call.info.start_time for call in following), default=float("inf"))
    began = sorted(
        (s for s in spans if s.name == OPERATION and _is_record(s.attributes)),
        key=lambda span: span.start_time or 0.0,
    )
    return [
        RecordedTool(
            span_id=span.span_id,
            inside=a.get(REPLAYABLE_INSIDE),
            name=a[OPERATION_NAME],
            arguments=digest_of(a[OPERATION_INPUT]),
            result=a.get(OPERATION_OUTPUT) if a[REPLAYABLE] and _ended(span) <= point else None,
        )
        for span in began
        if (span.start_time or 0.0) <= point and (a := span.attributes)
    ]


def _ended(span: Span) -> float:
    return float("inf") if span.end_time is None else span.end_time


def recording_of(
    rollout_id: str,
    calls: Sequence[Call],
    tool_call_ids: Mapping[str, list[str]],
    *,
    diverged: Literal["live", "refuse"] = "live",
    tools: Sequence[RecordedTool] = (),
    edits: Mapping[EditRole, str] | None = None,
) -> RecordedAttempt:
    """The recording of these calls of a rollout, in their order.

    tool_call_ids: the ids of the calls of tools in each call's answer, by call.
    diverged, edits: see `RecordedAttempt`.
    """
    found: list[RecordedCall] = []
    before: list[int] = []
    for call in calls:
        prompt, response = call.prompt_ids.tolist(), call.response_ids.tolist()
        keep = _shared(before, prompt)
        found.append(
            RecordedCall(
                call_id=call.info.call_id,
                policy=call.info.policy,
                prompt_keep=keep,
                prompt_ids=prompt[keep:],
                response_ids=response,
                logprobs=call.logprobs.tolist(),
                plain_logprobs=call.plain_logprobs.tolist(),
                versions=[(run.start, run.version) for run in call.versions],
                length=call.info.finish_reason == "length",
                used=dict(call.info.used),
                tool_call_ids=tool_call_ids.get(call.info.call_id, []),
                attempt_id=call.info.attempt_id,
                prompt_segment_id=call.prompt_segment_id,
                response_segment_id=call.response_segment_id,
            )
        )
        before = [*prompt, *response]
    return RecordedAttempt(
        rollout_id=rollout_id, calls=found, diverged=diverged, tools=list(tools), edits=dict(edits or {})
    )


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((n for n, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))
