"""Bodies that are read before it is known whose they are, for the ids of earlier answers that they go on from."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from agentlightning.gateway.dialects import Dialect
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.limits import RequestLimits, Waiting
from agentlightning.gateway.serving.http import Receive, read_body

_SECONDS = 60.0
_MOST_IDS = 1000


class ReadAhead:
    """Reads bodies within the limits that the gateway has for them."""

    def __init__(self) -> None:
        self.limits = RequestLimits()
        self._waiting = Waiting(self.limits)

    async def read(self, client: bytes, headers: Mapping[bytes, bytes], receive: Receive) -> bytes | None:
        """The body; None for one that says itself that it is too long, which the gateway refuses. Raises `Refusal`."""
        try:
            self.limits.check_length(headers.get(b"content-length"))
        except Refusal:
            return None
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._waiting.hold(client, size)
            held += size

        try:
            return await read_body(receive, _SECONDS, self.limits, headers.get(b"content-length"), hold)
        finally:
            self._waiting.release(client, held)


def replayed(body: bytes, receive: Receive) -> Receive:
    """Gives out a body that was read as if it came now, and then what comes after it."""
    parts = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return parts.pop() if parts else await receive()

    return again


def earlier_ids(dialect: Dialect, body: bytes) -> list[str]:
    """The ids of answers that a body may refer to: the one that the whole request continues first, then the latest."""
    assert dialect.refers is not None, dialect.name
    whole, parts = dict[bytes, None](), dict[bytes, None]()
    prefix = f'"{dialect.id_prefix}'.encode()
    for found in dialect.refers.finditer(body):
        (whole if found[0].startswith(prefix) else parts)[found[1]] = None
    return [f"{dialect.id_prefix}{one.decode()}" for one in islice((*whole, *reversed(parts)), _MOST_IDS)]
