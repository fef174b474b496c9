"""Keys of messages: equal where two messages say the same, so that a request is matched to a known history. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec

from agentlightning.rendering.messages import Message

DIGEST = 16
"""Bytes of a key."""


def exact_key(message: Message) -> bytes:
    """Equal for messages that say the same in the same words, whatever was thought before them; the white space of
    tool-call JSON does not count.
    """
    calls = [(c["id"], *_call(c)) for c in message.get("tool_calls", ())]
    return digest((message["role"], message["content"], calls, message.get("tool_call_id"), message.get("name")))


def similar_key(message: Message) -> bytes:
    """As `exact_key`, without the ids and the white space around the text."""
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
            self._exact[index] = exact_key(self.messages[index])
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
