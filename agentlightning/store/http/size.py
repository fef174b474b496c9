"""How much work a body from somebody who is not trusted may be, found out before it is decoded.

A few KiB of gzip can say two million empty spans: what counts is how many things there are, not only how many bytes.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from agentlightning.errors import StoreError

MAX_SPANS = 5_000
"""In one request."""
MAX_FIELDS = 250_000
"""In one request: every number, text, attribute, event and link of its spans."""


SHORT_BYTES = 16 * 1024
"""A body up to this size is read at once, a longer one in a process of its own."""
SHORT_FIELDS = 500
"""Of OTLP, so many fields are read at once: what is empty takes two bytes, and its span as long as any other."""
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class TooMuch(StoreError):
    """A request is larger than one may be."""


def too_many(what: str, most: int) -> TooMuch:
    return TooMuch(f"The request has more than {most} {what}; send smaller batches.")


def check_json(body: bytes) -> None:
    """Raise `TooMuch` for JSON with more values, in objects and lists, than a request may have."""
    if values_of(body) > MAX_FIELDS and values_of(_TEXT.sub(b"", body)) > MAX_FIELDS:
        raise too_many("values", MAX_FIELDS)


def values_of(body: bytes) -> int:
    """No fewer than there are; commas and brackets in texts count too."""
    return body.count(b",") + body.count(b"{") + body.count(b"[")


def check_protobuf(body: bytes, descriptor: Any, most: int = MAX_FIELDS) -> None:
    """Raise `TooMuch` for a message with more fields than a request may have; what is malformed is not judged."""
    fields = 0
    waiting = [(0, len(body), descriptor)]
    while waiting:
        position, end, message = waiting.pop()
        nested = _messages_in(message)
        while position < end:
            fields += 1
            if fields > most:
                raise too_many("fields", most)
            tag, position = _varint(body, position)
            kind = tag & 7
            if kind == 2:
                length, position = _varint(body, position)
                if (inner := nested.get(tag >> 3)) is not None:
                    waiting.append((position, min(position + length, end), inner))
                position += length
            elif kind == 0:
                _, position = _varint(body, position)
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                break  # groups, which OTLP has none of: the parser says what is wrong


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(body) and shift < 70:
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    return value, position


@cache
def _messages_in(descriptor: Any) -> dict[int, Any]:
    """The fields of a message that are messages themselves, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}
