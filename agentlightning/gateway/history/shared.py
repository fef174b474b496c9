"""What all attempts may hold of a gateway's memory together, and who gives something up where that is too much."""

from __future__ import annotations

from typing import Any, Protocol


class Holder(Protocol):
    """What counts its bytes and can give some up, the part not used for longest first: the store has it all."""

    @property
    def bytes(self) -> int: ...

    def leave_one(self, current: Any) -> bool:
        """Let the part not used for longest leave, unless it is the current one; whether one left."""
        ...


class Shared:
    """What holders may hold together. Who holds most gives up first, so that one that holds little loses nothing to
    others that hold much.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._holders: dict[int, Holder] = {}
        """By identity."""

    def count(self, holder: Holder, more: int) -> None:
        """So many bytes more are held, or less."""
        self.bytes += more
        self._holders[id(holder)] = holder

    def forget(self, holder: Holder) -> None:
        """It holds nothing any more."""
        if self._holders.pop(id(holder), None) is not None:
            self.bytes -= holder.bytes

    def trim(self, holder: Holder, current: Any) -> None:
        """Let parts leave until the rest fits; never the `current` one of this holder."""
        spent: set[int] = set()
        while self.bytes > self.most:
            left = (one for one in self._holders.values() if id(one) not in spent)
            most = max(left, key=lambda one: one.bytes, default=None)
            if most is None:
                return
            if not most.leave_one(current if most is holder else None):
                spent.add(id(most))
