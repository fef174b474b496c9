"""What pages are told, as JSON that every browser reads: numbers that are none become null, long texts are cut, and
keys are not shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import BaseModel

from agentlightning.keys import redacted

MOST_TEXT = 100_000
"""Characters of one text that a page is told; what is cut says so."""
_SECRET = re.compile(r"(api_?key|secret|password|authorization|access_?token)$", re.IGNORECASE)
HIDDEN = "•••"


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return str(value)


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def as_json(value: Any) -> bytes:
    """NaN and infinity as null, and no attempt's key, whatever the field."""
    return redacted(_encoder.encode(value).decode()).encode()


def cut(text: str, most: int = MOST_TEXT) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters)"


def shown(value: Any, most: int = MOST_TEXT) -> Any:
    """A value from a store for people to see: keys hidden, long texts cut, inside lists and dicts too."""
    if isinstance(value, str):
        return cut(redacted(value), most)
    if isinstance(value, Mapping):
        return {
            str(key): HIDDEN if item and isinstance(item, str) and _SECRET.search(str(key)) else shown(item, most)
            for key, item in value.items()
        }
    return [shown(item, most) for item in value] if isinstance(value, list | tuple) else value
