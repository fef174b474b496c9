"""Answers that clients of no rollout may go on from: by the id of a response, for a while, and only so many.

An id is a capability: it is long and random. Who sent another key with the request that it answered does not find it.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass

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
        """Those of the clients that send this key; what is added is an answer of this session."""
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
        """They are kept equally long, so the first one is the next to go."""
        now = self._clock()
        while self._kept:
            key, first = next(iter(self._kept.items()))
            if first.until > now and len(self._kept) <= self._most and self._held <= self._characters:
                return
            self.forget(*key)


class OwnAnswers(MutableMapping[str, Messages]):
    """Those of one owner."""

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
