"""The parent's end of the socket to a model server: who waits for which answer, and what becomes of the waiting when
the server ends.

`StallWatch` judges whether a server that has work to do gets on with it: by its progress (passes computed, processor
time used), never by how long the work takes. A process that is suspended or waits for something that never comes makes
no progress; one that computes a long pass does, and one that has nothing to do owes none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from agentlightning.backend.embedded.protocol import (
    CallFailed,
    Events,
    Frames,
    MethodCall,
    Pulse,
    Ready,
    Reply,
    StopProcess,
    ToChild,
    frame,
    to_error,
    to_parent,
)
from agentlightning.engine.base import Chunk
from agentlightning.engine.events import Ended, Event, PartialSample, Request, SampledTokens
from agentlightning.errors import AgentLightningError, BackendDied

logger = logging.getLogger(__name__)

STOP_SECONDS = 20.0
LINGER_SECONDS = 10.0
"""How long a server that lost its socket may go on."""

STALL_SECONDS = 120.0
"""A server that makes no progress for so long, though something is asked of it, is ended."""

Answers = asyncio.Queue[Chunk | AgentLightningError]


class Connection(asyncio.Protocol):
    """One server from its start to its end. Requests and calls are answered by it, or fail with it."""

    pid: int | None = None
    """Of the server's process, if it has one of its own."""

    def __init__(self, supervise: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """`supervise` waits for the end of the server and says how it ended."""
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Ready] = loop.create_future()
        self._loop = loop
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._outgoing: list[bytes] = []
        self._answers: dict[int, Answers] = {}
        self._replies: dict[int, asyncio.Future[Reply]] = {}
        self._death: str | None = None
        self._stopping = False
        self.watch = StallWatch(STALL_SECONDS)
        self._stalled = False
        self._looks = loop.call_later(1.0, self._look, loop.time())
        self._supervisor = loop.create_task(self._until_its_end(supervise))

    @property
    def is_ready(self) -> bool:
        return self.ready.done() and not self.ready.cancelled() and self.ready.exception() is None

    def last_words(self) -> str:
        """The end of the server's output, for an error's message."""
        return ""

    def send(self, message: ToChild) -> None:
        """Queue a message; all of one turn of the event loop are written at once."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing.append(frame(message))

    def request(self, request: Request) -> Answers:
        """Send a request; its chunks, or the error that ends it, come out of the queue."""
        self._raise_if_dead()
        answers = self._answers[request.request_id] = Answers()
        self.send(request)
        return answers

    def forget(self, request_id: int) -> bool:
        """Stop listening for a request. Whether it was still going on."""
        return self._answers.pop(request_id, None) is not None

    async def call(self, call: MethodCall) -> Reply:
        """Send a call and wait for its reply; raises the error that the process refused it with."""
        self._raise_if_dead()
        reply = self._replies[call.call_id] = self._loop.create_future()
        self.send(call)
        try:
            return await reply
        finally:
            self._replies.pop(call.call_id, None)

    async def death(self) -> str:
        """Wait for the end of the server; how it ended."""
        await asyncio.shield(self._supervisor)
        return self._death or "The model process was stopped."

    async def stop(self) -> None:
        """Ask the server to end; kill it if it does not."""
        self._stopping = True
        self.send(StopProcess())
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.shield(self._supervisor)
        except TimeoutError:
            logger.warning("The model process did not stop within %.0f s and is killed", STOP_SECONDS)
            await self.kill()

    async def kill(self) -> None:
        """End the server now."""
        self._stopping = True
        self._kill()
        await asyncio.shield(self._supervisor)

    def _kill(self) -> None:
        """Let the server end, however it must be done."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            message = to_parent.decode(body)
            if not isinstance(message, Pulse):
                self.watch.moved()
            match message:
                case Pulse(passes, cpu_seconds, idle):
                    self.watch.pulse(passes, cpu_seconds, idle=idle)
                case Events(events):
                    for event in events:
                        self._deliver(event)
                case Reply() as reply:
                    self._resolve(reply.call_id, reply)
                case CallFailed(call_id, name, message):
                    self._resolve(call_id, to_error(name, message))
                case Ready() as ready:
                    self.ready.set_result(ready)

    def connection_lost(self, exc: Exception | None) -> None:
        # It is about to end; a server that lost its socket and lives on is of no use.
        self._loop.call_later(LINGER_SECONDS, self._kill)

    def _look(self, before: float) -> None:
        """Once a second: whether the server gets on with what it was asked."""
        now = self._loop.time()
        found = self.watch.look(busy=self.is_ready and bool(self._answers or self._replies), seconds=now - before)
        if found == "stalled":
            self._stalled = True
            self._kill()
            return
        if found == "slow":
            logger.warning(
                "The model process makes no progress for %.0f s: is it suspended, or the machine short of memory? "
                "It is given up after %.0f s.",
                self.watch.quiet, self.watch.limit,
            )  # fmt: skip
        self._looks = self._loop.call_later(1.0, self._look, now)

    def _deliver(self, event: Event) -> None:
        """Hand an event to those who wait for it; nobody waits for requests that were given up."""
        if isinstance(event, SampledTokens):
            for row, request_id in enumerate(event.request_ids):
                answers = self._answers.get(request_id)
                if answers is not None:
                    answers.put_nowait(_one_token(event, row))
            return
        goes_on = isinstance(event, PartialSample)
        answers = self._answers.get(event.request_id) if goes_on else self._answers.pop(event.request_id, None)
        if answers is not None:
            answers.put_nowait(
                event.chunk if isinstance(event, PartialSample | Ended) else to_error(event.error, event.message)
            )

    def _resolve(self, call_id: int, outcome: Reply | AgentLightningError) -> None:
        waiting = self._replies.get(call_id) if call_id else self.ready
        if waiting is None or waiting.done():
            return
        if isinstance(outcome, AgentLightningError):
            waiting.set_exception(outcome)
        else:
            cast("asyncio.Future[Reply]", waiting).set_result(outcome)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise BackendDied(self._death)

    async def _until_its_end(self, supervise: Callable[[], Coroutine[Any, Any, str]]) -> None:
        """Tell everyone who waits for the server when it has ended."""
        how = await supervise()
        self._looks.cancel()
        if self._stalled:
            how = f"The model process made no progress for {self.watch.limit:.0f} s and was ended. {how}"
        self._death = "The model process was stopped." if self._stopping else how
        if not self._stopping:
            logger.info("%s", self._death)  # whoever watches it says so, and what is done about it
        if self._transport is not None:
            self._transport.close()
        for answers in self._answers.values():
            answers.put_nowait(BackendDied(self._death))
        self._answers.clear()
        for waiting in (self.ready, *self._replies.values()):
            if not waiting.done():
                waiting.set_exception(BackendDied(self._death))
        if not self.ready.cancelled():
            self.ready.exception()  # whoever waited for it has it; nobody may have


def _one_token(event: SampledTokens, row: int) -> Chunk:
    one = slice(row, row + 1)
    return Chunk(
        ids=event.ids[one],
        logprobs=event.logprobs[one],
        plain_logprobs=event.plain_logprobs[one],
        version=event.version,
        top_ids=None if event.top_ids is None else event.top_ids[one],
        top_logprobs=None if event.top_logprobs is None else event.top_logprobs[one],
        kept=event.kept,
    )


PULSE_SECONDS = 2.0
"""How often a process says how far it is."""
WARN_SECONDS = 15.0
"""After so long without progress a warning is logged."""
_LEAST_CPU = 0.01
"""Processor seconds between two pulses that are more than the pulse itself."""


@dataclass(slots=True)
class StallWatch:
    """Looks at a process once a second. `limit` is how many seconds without progress are too many."""

    limit: float
    quiet: float = 0.0
    """Seconds without progress."""
    seen: bool = False
    """Whether a pulse has come; before the first one the process is not judged."""
    _passes: int = field(default=0, repr=False)
    _cpu: float = field(default=0.0, repr=False)

    def pulse(self, passes: int, cpu_seconds: float, *, idle: bool = False) -> None:
        """The process reports how far it is; `idle` is whether it has nothing to do just now."""
        if idle or not self.seen or passes != self._passes or cpu_seconds - self._cpu >= _LEAST_CPU:
            self.quiet = 0.0
        self.seen = True
        self._passes, self._cpu = passes, cpu_seconds

    def moved(self) -> None:
        """The process gave an answer, or a part of one."""
        self.quiet = 0.0

    def look(self, *, busy: bool, seconds: float = 1.0) -> Literal["fine", "slow", "stalled"]:
        """`busy` is whether something is asked of it, `seconds` how long ago the last look was.

        "slow" is returned once. A look that comes late counts as one second: then it was the watcher who stood still.
        """
        if not busy or not self.seen:
            self.quiet = 0.0
            return "fine"
        before = self.quiet
        self.quiet += min(seconds, 1.0)
        if self.quiet >= self.limit:
            return "stalled"
        return "slow" if before < WARN_SECONDS <= self.quiet else "fine"
