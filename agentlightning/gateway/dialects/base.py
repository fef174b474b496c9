"""The seam of a wire format: bodies to requests, replies to bodies, streams to server-sent events; and `Paths`, which
finds the dialect that answers a request's path. Pure, no I/O.

A new wire format is one file and one entry in `dialects.DIALECTS`, or one object given to `Gateway(dialects=…)`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol

import msgspec

from agentlightning.errors import ConfigError
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, PromptEcho, Refusal
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


@dataclass(frozen=True)
class Unavailable:
    """A field that is known and cannot be honoured. The rest of the request goes on without it, unless it needs it."""

    why: str
    """The reason, and what to do about it, for people."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing."""
    needed: bool = False
    """Whether an answer without it would be a wrong one: then the request is refused."""


@dataclass(frozen=True)
class Fields:
    """What a wire format makes of each field of an object. Any other field is left out, and recorded as unknown."""

    honoured: tuple[str, ...]
    """Fields that act."""
    harmless: tuple[str, ...] = ()
    """Fields that are accepted and have no effect: bookkeeping of the provider, and hints a model may ignore."""
    unavailable: Mapping[str, Unavailable] = field(default_factory=dict)

    @cached_property
    def acting(self) -> frozenset[str]:
        """The honoured ones, for looking up."""
        return frozenset(self.honoured)


@dataclass(frozen=True)
class Kinds:
    """What a wire format makes of objects with a field that names their kind: parts, tools, items."""

    known: Mapping[str, Fields]
    """The fields of each kind that is honoured."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Kinds that are left out, and why; a name may be a pattern ("web_search_*")."""
    harmless: tuple[str, ...] = ()
    """Kinds that are left out and never meant to change an answer."""
    by: str = "type"
    """The field that names the kind."""
    default: str | None = None
    """The kind of an object without that field."""

    def why(self, kind: Any) -> str | None:
        """Why a kind is unavailable; None for one that is available or unknown."""
        if not isinstance(kind, str):
            return None
        return next((why for name, why in self.unavailable.items() if fnmatchcase(kind, name)), None)


class Dialect(ABC):
    """One wire format. Subclass it in a file of its own and give an instance to `Gateway(dialects=…)`.

    `parse`, `respond`, `writer` and `refuse` are for models that the gateway samples from. The methods below them are
    for calls that another provider answers; a dialect that leaves them out has such calls recorded as bodies only.
    """

    name: ClassVar[str]
    """The name in the records of calls."""
    title: ClassVar[str]
    """The name for people."""
    paths: ClassVar[tuple[str, ...]]
    """Without /v1, for example ("/chat/completions",). What stands in braces may be anything: "/models/{model}:answer".
    """
    counting_paths: ClassVar[tuple[str, ...]] = ()
    """Where the provider counts the tokens of a request instead of answering it."""
    id_prefix: ClassVar[str]
    """Of response ids."""
    fields: ClassVar[Fields]
    nested: ClassVar[Mapping[str, Fields | Kinds]] = {}
    """The same for the objects inside a request, by their path ("messages[].content[]")."""
    client_params: ClassVar[str | None] = None
    """Where the provider's own client describes a request ("module:TypedDict"), for the table of fields in the docs."""
    conversation_fields: ClassVar[tuple[str, ...]] = ()
    """The fields of a request that hold the conversation; enough for `parse`."""
    refers: ClassVar[re.Pattern[bytes] | None] = None
    """Finds in a body what names earlier answers that a request goes on from: the random part of their ids. None for
    formats that send the whole conversation."""
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    """What is sent in a stream while there is nothing to say; the format's clients must skip it."""

    @abstractmethod
    def parse(self, body: Body, answered: Answered) -> CallRequest:
        """What a request asks, with what of it is left out (`fields.Reading`).

        Raises `Refusal`, naming the field, for values that no request may have, and for what an answer needs and
        cannot be had.
        """

    @abstractmethod
    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        """The body of an answer."""

    @abstractmethod
    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        """Writes the answer as a stream."""

    @abstractmethod
    def refuse(self, refusal: Refusal) -> bytes:
        """The body of an error."""

    def located(self, body: Body, path: str, query: str) -> Body:
        """A request with what its URL says, as `parse` reads it: for formats whose paths carry the model."""
        return body

    def media_type(self, request: CallRequest) -> str:
        """Of the stream that `writer` writes."""
        return "text/event-stream; charset=utf-8"

    def counted(self, tokens: int) -> bytes:
        """The body of the answer where tokens were counted."""
        return msgspec.json.encode({"input_tokens": tokens})

    # ---- calls that another provider answers -----------------------------------------------------------------------

    def credentials(self, api_key: str | None) -> dict[str, str]:
        """The headers by which the provider knows its client."""
        return {"authorization": f"Bearer {api_key}"} if api_key else {}

    def asking_for_usage(self, body: Body) -> Body:
        """A request whose answer will tell its tokens, for formats that tell those of a stream only if asked."""
        return body

    def addressed(self, path: str, body: Body) -> tuple[str, Body]:
        """Where at the provider a request goes, and its body: the reverse of `located`."""
        return path, body

    def settings(self, body: Body) -> Body:
        """The object of a request that has `n` and the limit of an answer's tokens, under names that OpenAI uses."""
        return body

    def in_openai_terms(self, answer: Body) -> dict[str, Any]:
        """A provider's answer with its `id`, `model` and `usage` under these names."""
        return dict(answer)

    def answer_message(self, answer: Body) -> Message | None:
        """The message in a provider's answer. A body that cannot be read may raise what reading it raises."""
        return None

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        """The events of a provider's stream as the answer that would have come without it."""
        return {}


def sse(data: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


def logprob_rows(tokens: Choice | Delta, request: CallRequest, rendering: Rendering) -> list[msgspec.Raw]:
    """OpenAI's list of log-probs, one entry per sampled token, each with the alternatives that are asked for.

    Each is encoded at once: of many choices they are millions of objects, which would hold up everything else.
    """
    if tokens.ids is None or tokens.logprobs is None:
        return []
    rows: list[msgspec.Raw] = []
    for at, (token, logprob) in enumerate(zip(tokens.ids.tolist(), tokens.logprobs.tolist(), strict=True)):
        others: list[dict[str, Any]] = []
        if request.top_logprobs and tokens.top_ids is not None and tokens.top_logprobs is not None:
            pairs = zip(tokens.top_ids[at].tolist(), tokens.top_logprobs[at].tolist(), strict=True)
            others = [_token(request, rendering, i, p) for i, p in pairs]
        row = {**_token(request, rendering, token, logprob), "top_logprobs": others}
        rows.append(msgspec.Raw(msgspec.json.encode(row)))
    return rows


def prompt_rows(choice: Choice, request: CallRequest, rendering: Rendering) -> list[dict[str, Any] | None]:
    """vLLM's log-probs of a prompt: of each token but the first its own, and those of the most probable ones."""
    assert choice.prompt is not None, choice
    rows: list[dict[str, Any] | None] = [None]
    for token, logprob, others in prompt_logprobs(choice.prompt, request.prompt_logprobs or 0):
        ranks = {other: rank for rank, (other, _) in enumerate(others, 1)}
        rows.append(
            {
                str(one): {
                    "logprob": max(value, -9999.0),
                    "rank": ranks.get(one),
                    "decoded_token": rendering.token_text(one),
                }
                for one, value in {token: logprob, **dict(others)}.items()
            }
        )
    return rows


def prompt_logprobs(echo: PromptEcho, top: int) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token of a prompt but the first: its log-prob, and the `top` most probable ones with theirs."""
    found = echo.logprobs
    if found is None:
        return
    for at, (token, logprob) in enumerate(zip(echo.ids[1:].tolist(), found.logprobs.tolist(), strict=True)):
        others: list[tuple[int, float]] = []
        if top and found.top_ids is not None and found.top_logprobs is not None:
            others = list(zip(found.top_ids[at, :top].tolist(), found.top_logprobs[at, :top].tolist(), strict=True))
        yield token, logprob, others


def token_name(request: CallRequest, rendering: Rendering, token: int) -> str:
    """How log-probs name a token."""
    return f"token_id:{token}" if request.tokens_as_ids else rendering.token_text(token)


def _token(request: CallRequest, rendering: Rendering, token: int, logprob: float) -> dict[str, Any]:
    name, text = token_name(request, rendering, token), rendering.token_text(token)
    return {"token": name, "logprob": max(logprob, -9999.0), "bytes": [*text.encode()]}


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """OpenAI's error shape."""
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.wire_code,
        }
    }


_VARIES = re.compile(r"\\{(\w+)\\}")


class DialectRoute(NamedTuple):
    """A request's URL, as far as a dialect answers for it."""

    dialect: Dialect
    path: str
    """Without /v1 and what is before it."""
    query: str
    counting: bool
    """Whether the tokens of the request are counted instead of answering it."""

    def read(self, body: Body) -> Body:
        """The request, with what its URL says added to the body."""
        return self.dialect.located(body, self.path, self.query)


class Paths:
    """The paths of dialects, and those of `others` that they leave. Raises `ConfigError` if two dialects claim one."""

    def __init__(self, dialects: Sequence[Dialect], others: Sequence[Dialect] = ()) -> None:
        self._exact: dict[str, tuple[Dialect, bool]] = {}
        self._varying: list[tuple[re.Pattern[str], Dialect, bool]] = []
        for dialect in (*dialects, *others):
            for path in (*dialect.paths, *dialect.counting_paths):
                if dialect in dialects or path not in self._exact:
                    self._add(path, dialect, counting=path in dialect.counting_paths)

    @property
    def known(self) -> list[str]:
        """All paths, as the dialects write them."""
        return list(self._exact)

    def find(self, path: str, query: str = "") -> DialectRoute | None:
        """The dialect of a path; None if there is none."""
        found = self._exact.get(path)
        if found is None:
            matches = ((dialect, counts) for shape, dialect, counts in self._varying if shape.fullmatch(path))
            found = next(matches, None)
        return None if found is None else DialectRoute(found[0], path, query, found[1])

    def _add(self, path: str, dialect: Dialect, *, counting: bool) -> None:
        if path in self._exact:
            other = self._exact[path][0].name
            raise ConfigError(f"The dialects '{other}' and '{dialect.name}' both have the path {path}.")
        self._exact[path] = dialect, counting
        if "{" in path:
            self._varying.append((re.compile(_VARIES.sub(_part, re.escape(path))), dialect, counting))


def _part(varies: re.Match[str]) -> str:
    """A model's name may have slashes in it."""
    return ".+" if varies[1] == "model" else "[^/]+"
