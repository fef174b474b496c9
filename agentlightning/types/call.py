"""Calls: model calls that went through the gateway, with the exact tokens that were sampled.

Tokens are kept as immutable *segments*. A segment is a run of tokens that follows (the first `parent_keep` tokens of)
its parent; a prompt or a prompt + response is the path from a root to a segment. So an attempt of many turns costs its
unique tokens once. `Call` is the view for readers: whole arrays, put together once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentlightning.types.arrays import Float32Array, Int32Array
from agentlightning.types.span import Span


@dataclass(frozen=True, slots=True)
class VersionRun:
    """The tokens of a segment from index `start` on were sampled by weight version `version`."""

    start: int
    version: int


@dataclass(frozen=True, slots=True)
class SegmentSource:
    """A segment of another attempt, which was recorded and has the same tokens."""

    attempt_id: str
    segment_id: str


@dataclass(frozen=True, slots=True)
class SpanSource:
    """A span of another attempt, which was recorded and has the same messages."""

    attempt_id: str
    span_id: str


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens. `logprobs`, `plain_logprobs` and `versions` are there if the tokens were sampled.

    `logprobs` are under the distribution the token was really drawn from (after temperature, top_k, top_p);
    `plain_logprobs` under the plain softmax at the same temperature; `kept` are the tokens that a filter left to draw
    from, where they were written down (see `types.kept`).
    """

    segment_id: str
    parent_id: str | None
    parent_keep: int
    """How many tokens of the parent segment precede this one; all of them unless history was rewritten inside it."""
    ids: Int32Array
    logprobs: Float32Array | None = None
    plain_logprobs: Float32Array | None = None
    versions: tuple[VersionRun, ...] = ()
    kept: Int32Array | None = None
    source: SegmentSource | None = None
    """Where a store may have its tokens already, so that it need not store them again."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Why a call did not continue a known history: where it left it, how many tokens were lost, and the cause."""

    position: int
    """The first token that differs, counted from the start of the prompt."""
    tokens_lost: int
    """Tokens of the earlier history that are not shared, of a shorter prompt as many as it has anew."""
    cause: str
    """In words, for people."""


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Everything about a call but its tokens."""

    call_id: str
    """Unique. With n > 1, each choice is a call of its own: `{response_id}:{choice}`."""
    response_id: str
    """The id in the response that the client saw; the frameworks' own spans repeat it as gen_ai.response.id."""
    rollout_id: str
    attempt_id: str
    choice: int
    """Which of the n choices of a response this is, from 0."""
    policy: str
    """Alias of the policy (or engine, or provider) that answered."""
    trained: bool
    """False for frozen engines, other providers and judges: recorded, never trained."""
    agent: str | None
    """Which of several agents made the call; None: it did not say."""
    parent_call_id: str | None
    """The call whose prompt and response this call's prompt continues."""
    model: str
    """The model name the client asked for."""
    dialect: str
    """The wire format: chat, completions, responses or messages."""
    finish_reason: str
    """Why sampling ended: stop, length, tool_calls, …"""
    start_time: float
    end_time: float
    temperature: float
    """That the tokens were really sampled at."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings the client asked for."""
    used: Mapping[str, Any] = field(default_factory=dict)
    """Sampling settings that were used."""
    divergence: Divergence | None = None
    """Why it does not continue an earlier call, if it was meant to."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class CallRecord:
    """What the gateway writes: a call, the segments it adds, and where its prompt and its response end.

    `span` is the same call as a span for people and adapters, by the OpenTelemetry GenAI conventions; its messages are
    only those since the call it continues (`info.parent_call_id`), so that text does not grow with turns squared.
    """

    info: CallInfo
    prompt_segment_id: str
    response_segment_id: str
    segments: tuple[Segment, ...]
    span: Span
    span_source: SpanSource | None = None
    """Where a store may have the span's messages already, so that it need not store them again."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """What readers get: a call with its whole arrays."""

    info: CallInfo
    """Everything but the tokens."""
    prompt_ids: Int32Array
    """Shape [P]."""
    response_ids: Int32Array
    """Shape [R]."""
    logprobs: Float32Array
    """Shape [R], under the sampling distribution."""
    plain_logprobs: Float32Array
    """Shape [R], under the plain softmax at the same temperature."""
    versions: tuple[VersionRun, ...]
    """Runs over the response."""
    kept: Int32Array | None = None
    """What a filter left to draw each token from, where it was written down; see `types.kept`."""
    prompt_segment_id: str = ""
    """The segment that the prompt ends with, where the call was read from a store."""
    response_segment_id: str = ""
    """The segment that the response ends with."""
