"""The other stores on the same database: how far they are with what came to them.

A heartbeat may have come to one of them and not be stored yet, so each tells the others before which time all that came
to it is stored. What is read after one has said so holds all that.
"""

from __future__ import annotations

import time

import msgspec

Heartbeat = tuple[str, float | None]
"""Who says so, and the time before which all that came there is stored; None from one that closes."""
FORGET_SECONDS = 15.0
"""A store that has said nothing for so long is taken to be gone."""


class Others:
    """How far the other stores on the same database are with what came to them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._heartbeats: dict[str, tuple[float, float]] = {}
        """Of each, the time before which all that came to it is stored, and when it said so by our steady clock."""

    def hear(self, payload: str) -> None:
        name, beat = msgspec.json.decode(payload, type=Heartbeat)
        if name == self._name:
            return
        if beat is None:
            self._heartbeats.pop(name, None)
        else:
            self._heartbeats[name] = (beat, time.monotonic())

    def lag(self) -> float:
        """How many seconds ago the oldest thing came to one of them that is not stored."""
        forgotten = time.monotonic() - FORGET_SECONDS
        now = time.time()
        return max(
            (now - beat for beat, received in list(self._heartbeats.values()) if received > forgotten), default=0.0
        )
