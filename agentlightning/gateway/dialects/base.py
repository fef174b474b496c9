"""The seam of a wire format: bodies to requests, replies to bodies, streams to server-sent events. Pure, no I/O.

A new wire format is one file and one entry in `dialects.DIALECTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message

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


class Dialect(Protocol):
    """One wire format."""

    @property
    def name(self) -> str: ...

    @property
    def paths(self) -> tuple[str, ...]:
        """Without /v1, for example ("/chat/completions",)."""
        ...

    @property
    def counting_paths(self) -> tuple[str, ...]:
        """Where the provider counts the tokens of a request instead of answering it."""
        ...

    @property
    def id_prefix(self) -> str:
        """Of response ids."""
        ...

    def parse(self, body: Mapping[str, Any], answered: Answered) -> CallRequest:
        """Raises `Refusal` for what cannot be honoured, naming the field."""
        ...

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes: ...

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter: ...

    def refuse(self, refusal: Refusal) -> bytes:
        """The body of an error."""
        ...


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def logprob_rows(tokens: Choice | Delta, top: int, rendering: Rendering) -> list[dict[str, Any]]:
    """OpenAI's list of log-probs, one entry per sampled token, each with its `top` alternatives."""
    if tokens.ids is None or tokens.logprobs is None:
        return []
    rows = []
    for at, (token, logprob) in enumerate(zip(tokens.ids.tolist(), tokens.logprobs.tolist(), strict=True)):
        others: list[dict[str, Any]] = []
        if top and tokens.top_ids is not None and tokens.top_logprobs is not None:
            pairs = zip(tokens.top_ids[at].tolist(), tokens.top_logprobs[at].tolist(), strict=True)
            others = [_token(rendering, i, p) for i, p in pairs]
        rows.append({**_token(rendering, token, logprob), "top_logprobs": others})
    return rows


def _token(rendering: Rendering, token: int, logprob: float) -> dict[str, Any]:
    text = rendering.token_text(token)
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


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
