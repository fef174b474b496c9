"""The seam of a wire format: bodies to requests, replies to bodies, streams to server-sent events. Pure, no I/O.

A new wire format is one file and one entry in `dialects.DIALECTS`, or one object given to `Gateway(dialects=…)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec

from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message

Body = Mapping[str, Any]
Answered = Mapping[str, Sequence[Message]]
"""The histories that an attempt's earlier responses ended, by response id."""


class StreamWriter(Protocol):
    """Writes one streamed reply as server-sent events."""

    def start(self, prompt_tokens: int) -> bytes:
        """Before the first text."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def choice(self, choice: Choice) -> bytes:
        """A choice is whole; its text was sent, its tool calls and finish reason were not."""
        ...

    def finish(self, reply: Answer) -> bytes: ...

    def fail(self, refusal: Refusal) -> bytes:
        """The stream breaks off."""
        ...


class Fields(msgspec.Struct, frozen=True):
    """What a wire format makes of each field of a request. Any other field is refused by name."""

    read: tuple[str, ...]
    """Fields that are honoured."""
    harmless: tuple[str, ...] = ()
    """Fields that are accepted and have no effect: bookkeeping of the provider, and hints a model may ignore."""
    neutral: Mapping[str, tuple[Any, ...]] = {}
    """Fields that are accepted with the values that change nothing."""


class Dialect(ABC):
    """One wire format. Subclass it in a file of its own and give an instance to `Gateway(dialects=…)`.

    `parse`, `respond`, `writer` and `refuse` are for models that the gateway samples from. The methods below them are
    for calls that another provider answers; a dialect that leaves them out has such calls recorded as bodies only.
    """

    name: ClassVar[str]
    """Stands in the records of calls."""
    title: ClassVar[str]
    """For people."""
    paths: ClassVar[tuple[str, ...]]
    """Without /v1, for example ("/chat/completions",)."""
    counting_paths: ClassVar[tuple[str, ...]] = ()
    """Where the provider counts the tokens of a request instead of answering it."""
    id_prefix: ClassVar[str]
    """Of response ids."""
    fields: ClassVar[Fields]
    client_params: ClassVar[str | None] = None
    """Where the provider's own client describes a request ("module:TypedDict"), for the table of fields in the docs."""
    conversation_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of a request that hold the conversation; enough for `parse`."""

    @abstractmethod
    def parse(self, body: Body, answered: Answered) -> CallRequest:
        """Raises `Refusal` for what cannot be honoured, naming the field."""

    @abstractmethod
    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        """The body of an answer."""

    @abstractmethod
    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        """Writes the answer as a stream."""

    @abstractmethod
    def refuse(self, refusal: Refusal) -> bytes:
        """The body of an error."""

    # ---- calls that another provider answers -----------------------------------------------------------------------

    def credentials(self, api_key: str | None) -> dict[str, str]:
        """The headers by which the provider knows its client."""
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    def asking_for_usage(self, body: Body) -> Body:
        """A request whose answer will tell its tokens, for formats that tell those of a stream only if asked."""
        return body

    def said(self, answer: Body) -> Message | None:
        """The message in a provider's answer. A body that cannot be read may raise what reading it raises."""
        return None

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        """The events of a provider's stream as the answer that would have come without it."""
        return {}


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def logprob_rows(tokens: Choice | Delta, top: int, rendering: Rendering) -> list[msgspec.Raw]:
    """OpenAI's list of log-probs, one entry per sampled token, each with its `top` alternatives.

    Each is encoded at once: of many choices they are millions of objects, which would hold up everything else.
    """
    if tokens.ids is None or tokens.logprobs is None:
        return []
    rows: list[msgspec.Raw] = []
    for at, (token, logprob) in enumerate(zip(tokens.ids.tolist(), tokens.logprobs.tolist(), strict=True)):
        others: list[dict[str, Any]] = []
        if top and tokens.top_ids is not None and tokens.top_logprobs is not None:
            pairs = zip(tokens.top_ids[at].tolist(), tokens.top_logprobs[at].tolist(), strict=True)
            others = [_token(rendering, i, p) for i, p in pairs]
        row = {**_token(rendering, token, logprob), "top_logprobs": others}
        rows.append(msgspec.Raw(msgspec.json.encode(row)))
    return rows


def _token(rendering: Rendering, token: int, logprob: float) -> dict[str, Any]:
    text = rendering.token_text(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": [*text.encode()]}


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.code,
        }
    }
