"""Parts of agents' requests that have no effect here, as they are recorded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from agentlightning.types.names import LEFT_OUT
from agentlightning.types.span import Span

MEDIA = "this model reads text only"
"""Why an image, a sound or a file is left out."""


class LeftOut(msgspec.Struct, frozen=True):
    """A part of a request that has no effect: the request is answered as if it were not there."""

    field: str
    """Its path in the request; positions in lists are left out of it, so that equal ones are told once."""
    why: str
    kind: Literal["harmless", "unknown", "unavailable"]
    """Harmless: known, and never meant to change an answer. Unknown: nobody here knows it. Unavailable: known, and not
    to be had here."""


def left_out_of(spans: Iterable[Span]) -> list[LeftOut]:
    """What was left out of the requests of an attempt, by its spans."""
    found = [s.attributes[LEFT_OUT] for s in spans if LEFT_OUT in s.attributes]
    return [one for text in found for one in _decoder.decode(text)]


_decoder = msgspec.json.Decoder(list[LeftOut])
