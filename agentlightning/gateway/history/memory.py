"""What one session may hold, and what leaves it first: the least recently used branches. The store has them all.

A branch is what ends with one message and no other shares. It leaves with its messages and its tokens; of its answers
the digest of the way to each and the id of its call stay, so that a request that goes on from one has it read back.

`Shared` bounds what all attempts hold together, and picks who gives something up where that is too much.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.gateway.history.tree import DIGEST, Entry, MessageKeys, Piece

_ARRAY_BYTES = 4
_MESSAGE_BYTES, _PIECE_BYTES = 900, 400
"""The measured size of a message and of a piece without their content."""
MOST_LEFT = 4096
"""Calls that have left and can be found again."""


@dataclass(frozen=True, slots=True)
class SessionBudget:
    """What a session may hold; the branch in use may be larger."""

    messages: int = 16_384
    bytes: int = 32 * 2**20


class Memory:
    """The trees of a session as far as they are held. `shared` is what it holds together with others."""

    def __init__(self, budget: SessionBudget, shared: Shared | None = None) -> None:
        self._budget = budget
        self._shared = shared
        self.roots: dict[bytes, Entry] = {}
        """By the digest of the tools and of the chat template's arguments."""
        self.pieces: list[Piece] = []
        """The pieces that no tokens precede."""
        self.seen: dict[bytes, int] = {}
        """By `similar_key`, how many messages that are held have it."""
        self._ends: OrderedDict[Entry, None] = OrderedDict()
        """The last messages of branches, the least recently used first."""
        self._left: OrderedDict[bytes, str] = OrderedDict()
        self.messages = 0
        self.bytes = 0

    def add(self, entry: Entry) -> None:
        """Count a message that has been put below another."""
        self.messages += 1
        self._weigh(_weight(entry))
        self.seen[entry.loose] = self.seen.get(entry.loose, 0) + 1

    def attach(self, piece: Piece) -> None:
        (self.pieces if piece.parent is None else piece.parent.children).append(piece)
        self._weigh(_size(piece))

    def hold(self, entry: Entry, *pieces: Piece) -> None:
        """Keep tokens for as long as a message is kept, which has been used just now."""
        for piece in pieces:
            piece.uses += 1
            entry.pieces = [*entry.pieces, piece]
        self._ends[entry] = None
        self._ends.move_to_end(entry)

    def trim(self, current: Entry) -> None:
        """Let branches leave until the rest fits; never the current one."""
        while self.messages > self._budget.messages or self.bytes > self._budget.bytes:
            if not self.leave_one(current):
                break
        if self._shared is not None:
            self._shared.trim(self, current)

    def leave_one(self, current: Entry | None) -> bool:
        """Let the least recently used branch leave, unless it is the current one; whether one left."""
        oldest = next(iter(self._ends), current)
        if oldest is current or oldest is None:
            return False
        self.leave(oldest)
        return True

    def left(self, root: bytes, keys: MessageKeys, known: int) -> str | None:
        """The call whose answer is the last one in a request that has left, of those after the `known` messages."""
        if not self._left:
            return None
        found, way = None, hashlib.blake2b(root, digest_size=DIGEST)
        for index, message in enumerate(keys.messages):
            way.update(keys.similar(index))
            if index >= known and message["role"] == "assistant":
                found = self._left.get(way.copy().digest(), found)
        return found

    def clear(self) -> None:
        """Let everything go at once: parents and children know each other, so that they would wait for a collection."""
        entries, pieces = [*self.roots.values(), *self._ends], list(self.pieces)
        while entries:
            entry = entries.pop()
            entries += [child for same in entry.children.values() for child in same]
            entry.parent, entry.prompt, entry.children, entry.similar = None, None, {}, {}
            entry.turns, entry.pieces, entry.systems = (), (), ()
        while pieces:
            piece = pieces.pop()
            pieces += piece.children
            piece.parent, piece.turn, piece.children = None, None, []
        if self._shared is not None:
            self._shared.forget(self)
        self.__init__(self._budget, self._shared)

    def _weigh(self, more: int) -> None:
        self.bytes += more
        if self._shared is not None:
            self._shared.count(self, more)

    def leave(self, entry: Entry) -> None:
        """Let a message go, and those before it that are there for it alone."""
        self._ends.pop(entry, None)
        at: Entry | None = entry
        if entry.gone:  # a request that was under way when it left has held more tokens by it
            self._release(entry)
        while at is not None and not at.children and at not in self._ends and not at.gone:
            at.gone = True
            for turn in at.turns:
                self._left[_way_to(at)] = turn.call_id
                if len(self._left) > MOST_LEFT:
                    self._left.popitem(last=False)
            self._release(at)
            if at.parent is None:
                self.roots.pop(at.key, None)
            else:
                self._cut(at, at.parent)
            at = at.parent

    def _cut(self, entry: Entry, parent: Entry) -> None:
        self.messages -= 1
        self._weigh(-_weight(entry))
        self.seen[entry.loose] -= 1
        if not self.seen[entry.loose]:
            del self.seen[entry.loose]
        for table, key in ((parent.children, entry.key), (parent.similar, entry.loose)):
            table[key].remove(entry)
            if not table[key]:
                del table[key]
        if entry.text is not None:
            parent.systems = [other for other in parent.systems if other is not entry]

    def _release(self, entry: Entry) -> None:
        """Let go of the tokens that a message keeps."""
        pieces, entry.pieces = entry.pieces, ()
        for piece in pieces:
            piece.uses -= 1
            self._detach(piece)

    def _detach(self, piece: Piece) -> None:
        at: Piece | None = piece
        while at is not None and at.uses == 0 and not at.children and not at.gone:
            at.gone = True
            (self.pieces if at.parent is None else at.parent.children).remove(at)
            self._weigh(-_size(at))
            at = at.parent


def _way_to(entry: Entry) -> bytes:
    """The digest of an entry's way, as `Memory.left` computes it from a request's messages."""
    ways = list(_upwards(entry))
    return hashlib.blake2b(b"".join(reversed(ways)), digest_size=DIGEST).digest()


def _upwards(entry: Entry) -> Iterator[bytes]:
    at: Entry | None = entry
    while at is not None:
        yield at.key if at.parent is None else at.loose
        at = at.parent


def _weight(entry: Entry) -> int:
    return _MESSAGE_BYTES + len(entry.text or "") + len(entry.reasoning or "")


def _size(piece: Piece) -> int:
    arrays = 1 if piece.segment.logprobs is None else 3
    return _PIECE_BYTES + _ARRAY_BYTES * arrays * len(piece.segment.ids)


class Holder(Protocol):
    """Counts its bytes and can give some up, the least recently used part first: the store has it all."""

    @property
    def bytes(self) -> int: ...

    def leave_one(self, current: Any) -> bool:
        """Let the least recently used part leave, unless it is the current one; whether one left."""
        ...


class Shared:
    """What holders may hold together. The one that holds most gives up first, so that those that hold little lose
    nothing to others that hold much.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._holders: dict[int, Holder] = {}
        """By their identity."""

    def count(self, holder: Holder, more: int) -> None:
        """The holder has so many bytes more, or less if negative."""
        self.bytes += more
        self._holders[id(holder)] = holder

    def forget(self, holder: Holder) -> None:
        """The holder has nothing any more."""
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
