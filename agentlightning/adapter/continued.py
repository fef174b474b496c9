"""Which model calls of a trace go on from which others. Pure; takes time with their messages, not with their pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class MessagePlaces(NamedTuple):
    """Where a call stands in a `MessageTree`."""

    prompt: Sequence[int]
    """The places of its messages, in their order."""
    end: int
    """The place of its answer."""


class MessageTree:
    """What calls said, each message as a text below the one before it. What begins alike has the same places."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, str], int] = {}

    def add(self, prompt: Iterable[str], answer: str) -> MessagePlaces:
        """The places of a call's messages and of its answer."""
        places = [0]
        for text in (*prompt, answer):
            places.append(self._places.setdefault((places[-1], text), len(self._places) + 1))
        return MessagePlaces(places[1:-1], places[-1])
