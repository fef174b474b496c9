"""The conversations that stateful requests may refer to by the id of a response: as bytes, the latest ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableMapping

import msgspec

from agentlightning.gateway.history.shared import Shared
from agentlightning.rendering.messages import Message

_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(list[dict])  # pyright: ignore[reportMissingTypeArgument, reportUnknownVariableType, reportUnknownArgumentType]
MOST_LEFT = 4096
"""Responses whose conversations have left and can be read back from the store."""


class Answered(MutableMapping[str, list[Message]]):
    """By response. Those that were not used for longest leave when all together are larger than `most` bytes, or when
    there is too much of what is `shared` with other attempts.
    """

    def __init__(self, most: int = 16 * 2**20, shared: Shared | None = None) -> None:
        self._most = most
        self._shared = shared
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
        self._weigh(len(encoded))
        while self.bytes > self._most and self.leave_one(response_id):
            pass
        if self._shared is not None:
            self._shared.trim(self, response_id)

    def __delitem__(self, response_id: str) -> None:
        self._weigh(-len(self._held.pop(response_id)))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._held))

    def __len__(self) -> int:
        return len(self._held)

    def leave_one(self, current: str | None) -> bool:
        """Let the response not used for longest leave, unless it is the current one; whether one left."""
        oldest = next(iter(self._held), current)
        if oldest is None or oldest == current:
            return False
        del self[oldest]
        self._left[oldest] = None
        if len(self._left) > MOST_LEFT:
            self._left.popitem(last=False)
        return True

    def forget(self) -> None:
        """Let all go that is shared with other attempts."""
        if self._shared is not None:
            self._shared.forget(self)
            self._shared = None

    def _weigh(self, more: int) -> None:
        self.bytes += more
        if self._shared is not None:
            self._shared.count(self, more)

    def take_missed(self) -> str | None:
        """The response that was asked for last although it had left, once."""
        missed, self._missed = self._missed, None
        return missed
