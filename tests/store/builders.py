"""Spans and calls for the tests."""

from __future__ import annotations

import numpy as np

from agentlightning.types import AttemptedRollout, CallInfo, CallRecord, Segment, Span, VersionRun


def make_span(claim: AttemptedRollout, name: str = "step", /, **values: object) -> Span:
    return Span.from_attributes(
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        name=name,
        attributes=dict(values),
    )


def make_segment(
    segment_id: str,
    parent_id: str | None,
    keep: int,
    ids: list[int],
    version: int | None = None,
    kept: list[int] | None = None,
) -> Segment:
    """A sampled segment if it has a version, else one of a prompt."""
    array = np.array(ids, dtype=np.int32)
    if version is None:
        return Segment(segment_id, parent_id, keep, array)
    logprobs = -np.arange(len(ids), dtype=np.float32)
    sets = None if kept is None else np.array(kept, dtype=np.int32)
    return Segment(segment_id, parent_id, keep, array, logprobs, logprobs - 1, (VersionRun(0, version),), sets)


def make_call(claim: AttemptedRollout, call_id: str, prompt: str, response: str, *segments: Segment) -> CallRecord:
    info = CallInfo(
        call_id=call_id,
        response_id=call_id,
        rollout_id=claim.rollout_id,
        attempt_id=claim.attempt.attempt_id,
        choice=0,
        policy="policy",
        trained=True,
        agent=None,
        parent_call_id=None,
        model="policy",
        dialect="chat",
        finish_reason="stop",
        start_time=1.0,
        end_time=2.0,
        temperature=1.0,
        asked={"top_p": 0.5},
    )
    return CallRecord(info, prompt, response, segments, make_span(claim, "chat policy"))
