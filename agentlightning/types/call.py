"""Calls: model calls that went through the gateway, with the exact tokens that were sampled; parts of their requests
that had no effect; and what calls of other providers used (how many, their tokens, and their cost where a price is
known).

Tokens are kept as immutable *segments*. A segment is a run of tokens that follows (the first `parent_keep` tokens of)
its parent; a prompt or a prompt + response is the path from a root to a segment. So an attempt of many turns costs its
unique tokens once. `Call` is the view for readers: whole arrays, put together once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agentlightning.types.arrays import Float32Array, Int32Array
from agentlightning.types.finding import counted
from agentlightning.types.names import COST, LEFT_OUT
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
    from, where they were written down (see `types.arrays`).
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
    """What a filter left to draw each token from, where it was written down; see `types.arrays`."""
    prompt_segment_id: str = ""
    """The segment that the prompt ends with, where the call was read from a store."""
    response_segment_id: str = ""
    """The segment that the response ends with."""


MEDIA = "this model reads text only"
"""Why an image, a sound or a file is left out."""


class LeftOut(msgspec.Struct, frozen=True):
    """A part of a request that has no effect: the request is answered as if it were not there."""

    field: str
    """Its path in the request, without positions in lists, so that equal parts are recorded once."""
    why: str
    kind: Literal["harmless", "unknown", "unavailable"]
    """Harmless: known, and never meant to change an answer. Unknown: not known here. Unavailable: known, and not
    possible here."""


def left_out_of(spans: Iterable[Span]) -> list[LeftOut]:
    """What was left out of the requests of an attempt, by its spans."""
    found = list[LeftOut]()
    for span in spans:
        with suppress(msgspec.MsgspecError, TypeError, RecursionError):  # an agent's own span may say anything
            found += _decoder.decode(span.attributes.get(LEFT_OUT, "[]"))
    return found


_decoder = msgspec.json.Decoder(list[LeftOut])


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What some calls used together. `+` adds, `-` takes away a part."""

    calls: int = 0
    tokens: int = 0
    """Prompts and answers."""
    cost: float = 0.0
    """In the currency of the provider's price; 0 without a price."""

    def __add__(self, more: Spent) -> Spent:
        return Spent(calls=self.calls + more.calls, tokens=self.tokens + more.tokens, cost=self.cost + more.cost)

    def __sub__(self, part: Spent) -> Spent:
        return Spent(calls=self.calls - part.calls, tokens=self.tokens - part.tokens, cost=self.cost - part.cost)

    @classmethod
    def of_span(cls, span: Span) -> Spent:
        """The use that the span of one call records."""
        tokens = sum(int(number_at(span, f"gen_ai.usage.{kind}_tokens")) for kind in ("input", "output"))
        return cls(calls=1, tokens=tokens, cost=number_at(span, COST))

    def words(self) -> str:
        """The use in words, for people."""
        parts = [counted(self.calls, "call"), counted(self.tokens, "token")]
        return ", ".join([*parts, f"cost {self.cost:.4f}"] if self.cost else parts)


def number_at(span: Span, name: str) -> float:
    """An attribute that counts something; 0 where it is no number, as an agent's own span may have it."""
    value = span.attributes.get(name)
    return value if isinstance(value, int | float) and abs(value) < 2**63 else 0


def spent_of(spans: Iterable[Span]) -> dict[str, Spent]:
    """What was asked of other providers among these spans, by the provider's alias."""
    found: dict[str, Spent] = {}
    for span in spans:
        if "agentlightning.response" in span.attributes:
            alias = str(span.attributes.get("gen_ai.provider.name"))
            found[alias] = found.get(alias, Spent()) + Spent.of_span(span)
    return found
