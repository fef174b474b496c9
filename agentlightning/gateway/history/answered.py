"""The conversations that stateful requests may refer to by the id of a response: as bytes, the latest ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping

import msgspec

from agentlightning.rendering.messages import Message

_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(list[dict])  # pyright: ignore[reportMissingTypeArgument, reportUnknownVariableType, reportUnknownArgumentType]
MOST_LEFT = 4096
"""Responses whose conversations have left and can be read back from the store."""


class Answered(MutableMapping[str, list[Message]]):
    """By response. Those that were not used for longest leave when all together are larger than `most` bytes."""

    def __init__(self, most: int = 16 * 2**20) -> None:
        self._most = most
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._left: OrderedDict[str, None] = OrderedDict()
        self._missed: str | None = None
        self.bytes = 0

    def __getitem__(self, response_id: str) -> list[Message]:
        if response_id in self._left:
            self._missed = response_id
        found = self._held[response_id]
        self._held.move_to_end(response_id)
        return _decoder.decode(found)  # pyright: ignore[reportReturnType]

    def __setitem__(self, response_id: str, messages: list[Message]) -> None:
        self.pop(response_id, None)
        self._held[response_id] = encoded = _encoder.encode(messages)
        self._left.pop(response_id, None)
        self.bytes += len(encoded)
        while self.bytes > self._most and len(self._held) > 1:
            oldest = next(iter(self._held))
            del self[oldest]
            self._left[oldest] = None
            if len(self._left) > MOST_LEFT:
                self._left.popitem(last=False)

    def __delitem__(self, response_id: str) -> None:
        self.bytes -= len(self._held.pop(response_id))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def take_missed(self) -> str | None:
        """The response that was asked for last although it had left, once."""
        missed, self._missed = self._missed, None
        return missed
