"""The store as a sink: a run, its steps and what it says as rows, which other processes read while it goes on.

Telling it costs the training loop nothing: rows are written beside it, the latest status at most twice a second.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from agentlightning.errors import StoreError, StoreUnavailableError
from agentlightning.metrics.sink import Sink
from agentlightning.store.base import LightningStore
from agentlightning.types import RunEvent, RunEventKind

logger = logging.getLogger(__name__)

WRITE_SECONDS = 0.5
"""How often waiting rows are written."""
MOST_WAITING = 10_000
"""Rows that wait for a store that is out of reach; later rows are dropped, which is logged once."""


class StoreSink(Sink):
    """Belongs to one life of one run. May be told things from any thread."""

    def __init__(self, store: LightningStore, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._events: list[RunEvent] = []
        self._state: dict[str, Any] = {}
        self._numbers = itertools.count()
        self._life = f"{time.time_ns():x}"
        self._full = False

    def step(self, metrics: Mapping[str, Any]) -> None:
        step = int(metrics["step"])
        self._add("step", dict(metrics), step=step, event_id=f"step-{step}")
        self._state["step"] = step

    def status(self, text: str) -> None:
        self._state["doing"] = text

    def note(self, text: str) -> None:
        self._add("note", {"text": text})

    def warn(self, text: str) -> None:
        self._add("warning", {"text": text})

    def verdict(self, text: str) -> None:
        self._add("verdict", {"text": text})

    def event(self, name: str, data: Mapping[str, Any]) -> None:
        self._add("event", {"name": name, **data})

    def _add(
        self, kind: RunEventKind, data: dict[str, Any], *, step: int | None = None, event_id: str | None = None
    ) -> None:
        if len(self._events) >= MOST_WAITING:
            if not self._full:
                logger.warning("The store cannot be reached: what the run says from now on is not kept in it.")
            self._full = True
            return
        named = event_id or f"{kind}-{self._life}-{next(self._numbers)}"
        event = RunEvent(run_id=self._run_id, event_id=named, kind=kind, time=time.time(), step=step, data=data)
        self._events.append(event)

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[None]:
        """Write until the context ends, and then what is left."""
        task = asyncio.create_task(self._write())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self._flush()

    async def _write(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self._flush()

    async def _flush(self) -> None:
        """Raises nothing: what could not be written waits for the next time, and what is refused is dropped."""
        events, state = list(self._events), dict(self._state)
        try:
            if events:
                await self._store.add_run_events(events)
                del self._events[: len(events)]
            if state:
                await self._store.update_run(self._run_id, state=state)
                self._state = {name: value for name, value in self._state.items() if state.get(name) != value}
        except StoreUnavailableError as error:
            logger.debug("What the run said waits for its store: %s", error)
        except StoreError as error:
            logger.warning("What the run said is not kept: %s", error)
            del self._events[: len(events)]
            self._state.clear()
