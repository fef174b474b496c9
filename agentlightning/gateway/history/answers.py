"""Answers that a later request may go on from by the id of a response: `RecentAnswers` of clients that belong to no
rollout, for a while and only so many, and `Answered` those of one attempt, as bytes, the latest ones.

An id is a capability: it is long and random, and a client finds it only with the key that it sent for that response.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass

import msgspec

from agentlightning.gateway.history.memory import Shared
from agentlightning.rendering.messages import Message

Messages = list[Message]
_OVERHEAD = 100


@dataclass(frozen=True, slots=True)
class _Kept:
    messages: Messages
    session: str
    size: int
    until: float


class RecentAnswers:
    """The messages up to and including each answer. The oldest go first when there are too many, or too large ones."""

    def __init__(
        self,
        *,
        seconds: float = 3600.0,
        most: int = 10_000,
        characters: int = 256 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = seconds
        self._most = most
        self._characters = characters
        self._clock = clock
        self._kept: OrderedDict[tuple[bytes, str], _Kept] = OrderedDict()
        self._held = 0

    def of(self, key: bytes, session: str = "") -> OwnAnswers:
        """The answers of the clients that send this key; what is added belongs to this session."""
        return OwnAnswers(self, hashlib.blake2b(key, digest_size=16).digest(), session)

    def find(self, owner: bytes, response_id: str) -> Messages | None:
        self._forget_old()
        found = self._kept.get((owner, response_id))
        return None if found is None else found.messages

    def session(self, owner: bytes, response_id: str) -> str | None:
        """In which session a response was given."""
        self._forget_old()
        found = self._kept.get((owner, response_id))
        return None if found is None else found.session

    def keep(self, owner: bytes, response_id: str, messages: Messages, session: str = "") -> None:
        self.forget(owner, response_id)
        size = sum(_OVERHEAD + len(str(value)) for message in messages for value in message.values())
        self._kept[owner, response_id] = _Kept(messages, session, size, self._clock() + self.seconds)
        self._held += size
        self._forget_old()

    def forget(self, owner: bytes, response_id: str) -> None:
        gone = self._kept.pop((owner, response_id), None)
        self._held -= 0 if gone is None else gone.size

    def ids(self, owner: bytes) -> list[str]:
        self._forget_old()
        return [response_id for whose, response_id in self._kept if whose == owner]

    def _forget_old(self) -> None:
        """Forget what is too old or too much. All are kept equally long, so the first one is the next to go."""
        now = self._clock()
        while self._kept:
            key, first = next(iter(self._kept.items()))
            if first.until > now and len(self._kept) <= self._most and self._held <= self._characters:
                return
            self.forget(*key)


class OwnAnswers(MutableMapping[str, Messages]):
    """The recent answers of one owner."""

    def __init__(self, answers: RecentAnswers, owner: bytes, session: str) -> None:
        self._answers = answers
        self._owner = owner
        self._session = session
        self.grew = False
        """Whether an answer was added by this mapping."""

    def session(self, response_id: str) -> str | None:
        """In which session a response was given."""
        return self._answers.session(self._owner, response_id)

    def __getitem__(self, response_id: str) -> Messages:
        found = self._answers.find(self._owner, response_id)
        if found is None:
            raise KeyError(response_id)
        return found

    def __setitem__(self, response_id: str, messages: Messages) -> None:
        self._answers.keep(self._owner, response_id, messages, self._session)
        self.grew = True

    def __delitem__(self, response_id: str) -> None:
        self[response_id]
        self._answers.forget(self._owner, response_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._answers.ids(self._owner))

    def __len__(self) -> int:
        return len(self._answers.ids(self._owner))


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(list[dict])  # pyright: ignore[reportMissingTypeArgument, reportUnknownVariableType, reportUnknownArgumentType]
_MOST_LEFT = 4096
"""Responses whose conversations have left and can be read back from the store."""


class Answered(MutableMapping[str, list[Message]]):
    """One attempt's conversations by the id of their response. The least recently used leave when all are larger than
    `most` bytes, or when there is too much of what is `shared` with other attempts.
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
        """Let the least recently used response leave, unless it is the current one; whether one left."""
        oldest = next(iter(self._held), current)
        if oldest is None or oldest == current:
            return False
        del self[oldest]
        self._left[oldest] = None
        if len(self._left) > _MOST_LEFT:
            self._left.popitem(last=False)
        return True

    def forget(self) -> None:
        """Count no longer among what is shared with other attempts."""
        if self._shared is not None:
            self._shared.forget(self)
            self._shared = None

    def _weigh(self, more: int) -> None:
        self.bytes += more
        if self._shared is not None:
            self._shared.count(self, more)

    def take_missed(self) -> str | None:
        """The response that was last asked for although it had left; None when it was taken before."""
        missed, self._missed = self._missed, None
        return missed
