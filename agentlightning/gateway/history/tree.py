"""The two trees of a session: entries arrange messages, pieces arrange tokens; a turn ties a served call to both.
Messages are found by keys, which are equal where two messages say the same. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import msgspec

from agentlightning.rendering.messages import Message
from agentlightning.types.arrays import Int32Array, np
from agentlightning.types.call import Divergence, Segment


@dataclass(slots=True, eq=False)
class Piece:
    """A segment in its place: its tokens follow the first `segment.parent_keep` tokens of its parent's own."""

    segment: Segment
    parent: Piece | None
    start: int
    """How many tokens precede this piece."""
    turn: Turn | None = None
    """The first turn that was served on it."""
    children: list[Piece] = field(default_factory=list)
    recorded: bool = False
    """Whether a call that was handed to the recorder carries the segment."""
    uses: int = 0
    """How many messages hold it."""
    gone: bool = False
    """Whether it has left the session's memory."""

    @property
    def end(self) -> int:
        return self.start + len(self.segment.ids)


@dataclass(slots=True, eq=False)
class Turn:
    """A served call: where its prompt and its response end."""

    call_id: str
    number: int
    prompt: Piece
    response: Piece
    reasoned: bool
    """Whether this response or one before it in the same history holds reasoning."""


_NONE: Any = MappingProxyType({})
"""The empty mapping that most messages share for most of their fields."""


@dataclass(slots=True, eq=False)
class Entry:
    """A message in its place. An assistant's entry has the turns that were answered by it."""

    parent: Entry | None
    depth: int
    reasoning: str | None = None
    key: bytes = b""
    """Its `_exact_key`; of a root the digest of the tools and of the chat template's arguments."""
    loose: bytes = b""
    """Its `similar_key`; of a root the digest of the tools."""
    children: dict[bytes, list[Entry]] = field(default_factory=lambda: _NONE)
    """By exact message, ids of tool calls included; several, if the same was said after different reasoning."""
    similar: dict[bytes, list[Entry]] = field(default_factory=lambda: _NONE)
    """By message without ids, for clients that make up ids of their own."""
    text: str | None = None
    """What it says, if it is a system prompt."""
    systems: Sequence[Entry] = ()
    """The children that are system prompts."""
    turns: Sequence[Turn] = ()
    pieces: Sequence[Piece] = ()
    """The tokens that are kept for as long as it is."""
    gone: bool = False
    """Whether it has left the session's memory."""
    prompt: Prompt | None = None
    """The prompt that ends with this message, if it was asked."""


@dataclass(slots=True, frozen=True, eq=False)
class Prompt:
    """Where the tokens of a request's prompt end (`path_ids(piece)`), and what it continues."""

    piece: Piece
    entry: Entry
    parent: Turn | None
    new_from: int
    """Index of the first message after the response that this prompt continues."""
    divergence: Divergence | None


@dataclass(slots=True, frozen=True)
class Walk:
    """How far a request's messages are known."""

    entry: Entry
    turn: Turn | None
    turn_depth: int


def path_ids(piece: Piece) -> Int32Array:
    """All tokens from the root to the end of `piece`."""
    parts: list[Int32Array] = [piece.segment.ids]
    while piece.parent is not None:
        parts.append(piece.parent.segment.ids[: piece.segment.parent_keep])
        piece = piece.parent
    return parts[0] if len(parts) == 1 else np.concatenate(parts[::-1])


def unrecorded(piece: Piece) -> tuple[Segment, ...]:
    """The segments of a path that no recorded call carries yet, parents first; they count as recorded from now on."""
    segments: list[Segment] = []
    at: Piece | None = piece
    while at is not None and not at.recorded:
        at.recorded = True
        segments.append(at.segment)
        at = at.parent
    return tuple(reversed(segments))


def walk_to(root: Entry, keys: MessageKeys) -> Walk:
    """Follow the messages down all branches at once, and remember the last answer on each way."""
    frontier = [Walk(root, None, 0)]
    for index, message in enumerate(keys.messages):
        key = keys.exact(index)
        found = [(way, child) for way in frontier for child in way.entry.children.get(key, ())]
        if not found:
            loose = keys.similar(index)
            found = [(way, child) for way in frontier for child in way.entry.similar.get(loose, ())]
        found = [(way, child) for way, child in found if _same_reasoning(child, message)]
        if not found:
            break
        frontier = [
            Walk(child, child.turns[-1], child.depth) if child.turns else Walk(child, way.turn, way.turn_depth)
            for way, child in found
        ]
    return max(frontier, key=lambda way: (way.turn_depth, way.turn.number if way.turn else 0))


def _same_reasoning(entry: Entry, message: Message) -> bool:
    """A client may leave out reasoning it was given; if it sends some, it must be the same."""
    sent = message.get("reasoning_content")
    return not sent or sent.strip() == (entry.reasoning or "").strip()


def turn_at(piece: Piece, common: int) -> Turn | None:
    """The last turn whose whole response lies within the first `common` tokens of the path to `piece`."""
    at: Piece | None = piece
    while at is not None:
        if at.turn is not None and at.turn.response is at and at.end <= common:
            return at.turn
        common, at = min(common, at.start), at.parent
    return None


def begins_with(ids: Int32Array, before: Int32Array) -> bool:
    return len(before) <= len(ids) and common_length(before, ids) == len(before)


def common_length(a: Int32Array, b: Int32Array) -> int:
    """Length of the common prefix."""
    n, at, step = min(len(a), len(b)), 0, 16
    while at < n:  # in growing steps, so that two that differ early are not compared to their ends
        end = min(n, at + step)
        differ = np.flatnonzero(a[at:end] != b[at:end])
        if len(differ):
            return at + int(differ[0])
        at, step = end, 4 * step
    return n


DIGEST = 16
"""Bytes of a key."""


def _exact_key(message: Message) -> bytes:
    """Equal for messages that say the same in the same words. Reasoning does not count, nor does white space in the
    JSON of tool calls.
    """
    calls = [(c["id"], *_call(c)) for c in message.get("tool_calls", ())]
    return digest((message["role"], message["content"], calls, message.get("tool_call_id"), message.get("name")))


def similar_key(message: Message) -> bytes:
    """As `_exact_key`, without the ids and the white space around the text."""
    return digest((message["role"], message["content"].strip(), [_call(c) for c in message.get("tool_calls", ())]))


class MessageKeys:
    """The keys of a request's messages, each made when it is first asked for and once."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = messages
        self._exact: dict[int, bytes] = {}
        self._similar: dict[int, bytes] = {}

    @classmethod
    def made(cls, messages: Sequence[Message]) -> MessageKeys:
        """With all keys made, which takes long for many messages and needs no session."""
        keys = cls(messages)
        keys.make(0, len(messages))
        return keys

    @classmethod
    def of(cls, messages: Sequence[Message], digests: tuple[bytes, bytes]) -> MessageKeys:
        """With the keys that were made of these messages elsewhere."""
        keys = cls(messages)
        for made, joined in zip((keys._exact, keys._similar), digests, strict=True):
            made.update((at // DIGEST, joined[at : at + DIGEST]) for at in range(0, len(joined), DIGEST))
        return keys

    def make(self, start: int, end: int) -> None:
        """Make the keys of these messages."""
        for index in range(start, min(end, len(self.messages))):
            self.exact(index)
            self.similar(index)

    @property
    def digests(self) -> tuple[bytes, bytes]:
        """All keys, once they are made."""
        return b"".join(self._exact.values()), b"".join(self._similar.values())

    def exact(self, index: int) -> bytes:
        if index not in self._exact:
            self._exact[index] = _exact_key(self.messages[index])
        return self._exact[index]

    def similar(self, index: int) -> bytes:
        if index not in self._similar:
            self._similar[index] = similar_key(self.messages[index])
        return self._similar[index]


def _call(call: dict[str, Any]) -> tuple[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    try:
        return function["name"], json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return function["name"], arguments


def digest(value: Any) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value), digest_size=DIGEST).digest()
