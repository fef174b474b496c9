"""What the gateway and its process for large requests say to each other: frames (`net.helper_process`) of msgpack.

The bytes that follow a question are a request's body.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.exchange import CallRequest, Refusal
from agentlightning.gateway.limits import RequestLimits
from agentlightning.gateway.sampling.constraint import FormConstraint
from agentlightning.rendering.base import RenderingSource
from agentlightning.rendering.messages import Message, Tool

# ---- what is asked ---------------------------------------------------------------------------------------------------


class Measure(msgspec.Struct, frozen=True):
    """What a request's length is checked by."""

    source: RenderingSource
    max_context: int
    refuses: bool
    """False where a conversation that is too long is cut."""


class PromptFields(msgspec.Struct, frozen=True):
    """A resource that is put into requests (`gateway.prompts`), by its fields."""

    kind: str
    """Of `gateway.prompts.KINDS`."""
    fields: dict[str, Any]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Decode the body that follows, check it, and say what it asks."""

    dialect: str
    path: str
    query: str
    counting: bool
    """Whether only the number of its tokens is asked."""
    limits: RequestLimits
    strict: bool
    models: Mapping[str, Measure]
    """By the names that clients may give."""
    names: Sequence[str]
    """If there are any, a model that is not one of them means the first."""
    prompts: Sequence[PromptFields]
    agent: str | None
    answered: Mapping[str, list[Message] | None]
    """The histories that were asked for by `NeedsHistory`; None for one that does not exist."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Make ready what the questions after it need."""

    source: RenderingSource


class Render(msgspec.Struct, frozen=True, tag=True):
    source: RenderingSource
    messages: Sequence[Message]
    tools: Sequence[Tool] | None


class Bridge(msgspec.Struct, frozen=True, tag=True):
    source: RenderingSource
    prompt_ids: bytes
    response_ids: bytes
    messages: Sequence[Message]
    tools: Sequence[Tool] | None
    keep_reasoning: bool


class Encode(msgspec.Struct, frozen=True, tag=True):
    source: RenderingSource
    text: str


class Exceeds(msgspec.Struct, frozen=True, tag=True):
    source: RenderingSource
    texts: Sequence[str]
    tokens: int


class MakeGrammar(msgspec.Struct, frozen=True, tag=True):
    source: RenderingSource
    constraint: FormConstraint
    in_reasoning: bool


class StopAnswering(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the answer to the last question any more. Gets no answer of its own."""


Question = Load | Read | Render | Bridge | Encode | Exceeds | MakeGrammar


# ---- what is answered ------------------------------------------------------------------------------------------------


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A request without its messages, which come in pieces that are decoded one after another."""

    model: str
    """Which model is meant."""
    request: CallRequest
    pieces: Sequence[msgspec.Raw]
    remembered_from: int | None
    """The index of the first message that a later request may refer to."""


class Counted(msgspec.Struct, frozen=True, tag=True):
    tokens: int


class NeedsHistory(msgspec.Struct, frozen=True, tag=True):
    """The request goes on from this response: ask again with its history."""

    response_id: str


class Unmeasured(msgspec.Struct, frozen=True, tag=True):
    """The request's model is not among those that were given."""

    model: str


class RefusedRequest(msgspec.Struct, frozen=True, tag=True):
    """A `Refusal`."""

    model: str
    message: str
    status: int
    kind: str
    code: str | None
    param: str | None
    too_long: bool = False
    """Whether the prompt does not fit the model's context."""

    @classmethod
    def by(cls, refusal: Refusal, model: str = "unknown") -> RefusedRequest:
        too_long = refusal.wire_code == "context_length_exceeded"
        parts = refusal.message, refusal.status, refusal.kind, refusal.wire_code, refusal.param
        return cls(model, *parts, too_long=too_long)

    def refusal(self) -> Refusal:
        return Refusal(self.message, status=self.status, kind=self.kind, code=self.code, param=self.param)


class TokenIds(msgspec.Struct, frozen=True, tag=True):
    """Tokens as little-endian int32; None where there are none to be had."""

    ids: bytes | None


class Flag(msgspec.Struct, frozen=True, tag=True):
    yes: bool


class Grammar(msgspec.Struct, frozen=True, tag=True):
    text: str | None


class Impossible(msgspec.Struct, frozen=True, tag=True):
    """The chat format cannot express these messages."""

    why: str


class Unloadable(msgspec.Struct, frozen=True, tag=True):
    """The rendering cannot be loaded in this process."""

    why: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    """What cannot be answered: by a bug, or because of a value in the request that nothing here can hold."""

    why: str
    is_request: bool = False


Answer = (
    Taken
    | Counted
    | NeedsHistory
    | Unmeasured
    | RefusedRequest
    | TokenIds
    | Flag
    | Grammar
    | Impossible
    | Unloadable
    | Broken
)

question_of = msgspec.msgpack.Decoder(Question | StopAnswering)
answer_of = msgspec.msgpack.Decoder(Answer)
messages_of = msgspec.msgpack.Decoder(list[Message])


encoded = msgspec.msgpack.encode
