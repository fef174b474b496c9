"""The tracer: opens a trace around one attempt and brings its spans to the store. Base class of all tracers.

By itself it collects what the emitters record; a subclass adds a source of spans by overriding `_open` and `_close`.
One tracer serves any number of attempts at the same time. What it does not do: decide what a span means.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError, StoreClosedError, StoreError, StoreUnavailableError
from agentlightning.store.base import LightningStore
from agentlightning.tracer.trace import Trace, attach, capture, detach
from agentlightning.tracer.tree import SpanTree

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 2.0
"""How long a span of a running attempt waits before it is written; a shorter attempt is written once, at its end."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 15.0
"""Between two tries to write the spans of an attempt that has ended, while the store is out of reach."""

_last_trace: ContextVar[Trace | None] = ContextVar("agentlightning_last_trace", default=None)


@explained_class
class Tracer:
    """Life cycle: `init` once in the main process, `init_worker` in each runner process, then any number of
    `trace_context`s, `teardown_worker`, `teardown`. All four may be left out, and repeated without harm.
    """

    _store: LightningStore | None = None

    def __init__(self, *, flush_seconds: float = FLUSH_SECONDS) -> None:
        self._flush_seconds = flush_seconds
        self._last: Trace | None = None

    def init(self) -> None:
        """Set up what the whole process shares."""

    def init_worker(self, worker_id: int | str, store: LightningStore | None = None) -> None:
        """Set up what a runner process needs. With a store, traces of an attempt go there unless told otherwise."""
        self._store = store
        self.init()

    def teardown_worker(self, worker_id: int | str) -> None:
        """Undo `init_worker`."""
        self._store = None

    def teardown(self) -> None:
        """Undo `init`."""

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Trace]:
        """Collect the spans of what runs inside, in this task and in the tasks and threads started from it.

        With a store, they are written to it under the two ids: every few seconds, and at the latest when the context
        ends, whichever way it ends, however long the store is out of reach. Raises StoreError when it refuses them.
        """
        if store is not None and (rollout_id is None or attempt_id is None):
            raise ConfigError("A trace that goes to a store needs both rollout_id and attempt_id.")
        if rollout_id is not None and attempt_id is not None:
            store = store or self._store
        trace = Trace(name, rollout_id, attempt_id)
        self._last = trace
        _last_trace.set(trace)
        self._open(trace)
        outside = capture()
        ended = asyncio.Event()
        writer = None if store is None else asyncio.create_task(_write(trace, store, ended, self._flush_seconds))
        attach(trace)
        try:
            yield trace
        finally:
            detach(outside)
            self._close(trace)
            trace.close()
            ended.set()
            if writer is not None:
                await writer

    def get_last_trace(self) -> SpanTree:
        """The spans of the trace that this task opened last, else of the one that anybody opened last.

        It is a list that prints as a tree, and `draw("trace.svg")` makes an image of it.
        """
        trace = _last_trace.get() or self._last
        return SpanTree() if trace is None else SpanTree(trace.spans)

    def _open(self, trace: Trace) -> None:
        """A trace begins: start to route spans to it."""

    def _close(self, trace: Trace) -> None:
        """A trace ends: add what is still open, and stop to route spans to it."""


async def _write(trace: Trace, store: LightningStore, ended: asyncio.Event, flush_seconds: float) -> None:
    """Write the trace's spans to the store while the attempt runs, and the rest when it ended."""
    while not ended.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), flush_seconds)
            break
        try:
            await _flush(trace, store)
        except StoreError as error:
            logger.warning("Spans of attempt %s are kept and tried again: %s", trace.attempt_id, error)
    pause = FIRST_PAUSE_SECONDS
    while True:
        try:
            await _flush(trace, store)
            return
        except StoreClosedError:
            raise
        except StoreUnavailableError as error:
            logger.warning("Attempt %s has ended; its spans wait for the store: %s", trace.attempt_id, error)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_PAUSE_SECONDS)


async def _flush(trace: Trace, store: LightningStore) -> None:
    # A span that was written although its write looked failed is skipped by the store: its id is there already.
    if spans := trace.unstored():
        await store.add_many_spans(spans)
        trace.mark_stored(len(spans))
