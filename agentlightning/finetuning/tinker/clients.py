"""What a client of the Tinker API has on the server: a session, training clients and sampling clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.backend.embedded.handle import PolicyHandle
from agentlightning.errors import EngineError
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.tinker.bases import LoadedBase
from agentlightning.gateway.exchange import Refusal


class SequenceTurns:
    """Lets the requests of one training client in by their numbers, whenever they arrive."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._waiting: dict[int, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def turn(self, number: int | None) -> AsyncIterator[None]:
        """Within the block it is this number's turn; None is whoever is next. Raises `Refusal` for one that was."""
        number = max([self._next - 1, *self._waiting]) + 1 if number is None else number
        if number < self._next or number in self._waiting:
            raise Refusal(f"The request {number} of this training client was made before.", param="seq_id")
        if number > self._next:
            waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
            try:
                await waiting
            finally:
                self._waiting.pop(number, None)
        try:
            yield
        finally:
            self._next = number + 1
            if (following := self._waiting.get(self._next)) is not None and not following.done():
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
    heard_at: float
    training: list[str] = field(default_factory=list)
    sampling: list[str] = field(default_factory=list)
    finished: str | None = None
    """How, as its client said."""
