"""What a client of the Tinker API has on the server: a session, training clients and sampling clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.backend.embedded.client import PolicyHandle
from agentlightning.errors import EngineError
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.tinker.bases import LoadedBase
from agentlightning.gateway.exchange import Refusal

_MOST_AHEAD = 1 << 16
"""How far ahead of its turn a request may be given up."""


class SequenceTurns:
    """Lets the requests of one training client in by their numbers, whenever they arrive."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._busy = False
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._given_up: set[int] = set()

    @asynccontextmanager
    async def turn(self, number: int | None) -> AsyncIterator[None]:
        """Within the block it is this number's turn; None is whoever is next. Raises `Refusal` for one that was."""
        if number is None:
            number = max([self._next - 1, *self._waiting, *self._given_up]) + 1
        if number < self._next or number in self._waiting or number in self._given_up:
            raise Refusal(f"The request {number} of this training client was made before.", param="seq_id")
        if number > self._next:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                await waiting
            finally:
                self._waiting.pop(number, None)
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            self._let_in(number + 1)

    def give_up(self, number: int) -> None:
        """This number's request was refused and does not come again, so that those behind it do not wait for it."""
        here = number in self._waiting or (self._busy and number == self._next)
        if here or not self._next <= number < self._next + _MOST_AHEAD:
            return
        self._given_up.add(number)
        if not self._busy:
            self._let_in(self._next)

    def _let_in(self, number: int) -> None:
        while number in self._given_up:
            self._given_up.remove(number)
            number += 1
        self._next = number
        if (following := self._waiting.get(number)) is not None and not following.done():
            following.set_result(None)


@dataclass
class TrainingClient:
    """An adapter in training."""

    id: str
    owner: str
    base: BaseModel
    turns: SequenceTurns
    rank: int = 0
    loaded: LoadedBase | None = None
    """None until it is created."""
    unnamed: list[Path] = field(default_factory=list)

    def handle(self) -> PolicyHandle:
        """Raises EngineError where its adapter is gone."""
        if self.loaded is None:
            raise EngineError(f"The training client '{self.id}' was not created; its first request failed.")
        return self.loaded.policy(self.id)


@dataclass(frozen=True)
class SamplingClient:
    """A base model, or the weights in a folder."""

    id: str
    owner: str
    session: str
    base: str
    adapter: Path | None = None
    path: str | None = None


@dataclass
class TinkerSession:
    """What one client process has."""

    id: str
    owner: str
    created_at: float
    metadata: Mapping[str, Any]
    display_name: str | None
    last_request_at: float
    training: list[str] = field(default_factory=list)
    sampling: list[str] = field(default_factory=list)
    finished: str | None = None
    """How, as its client said."""
