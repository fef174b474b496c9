"""Answering one request over HTTP: sampling in a task, sending here, whichever ends first ends the other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from agentlightning.errors import StoreError
from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.dialects import Dialect
from agentlightning.gateway.dialects.base import StreamWriter
from agentlightning.gateway.exchange import UNUSABLE, Answer, CallRequest, Choice, Delta, Refusal, unusable
from agentlightning.gateway.large.wire import Measure
from agentlightning.gateway.limits import in_background
from agentlightning.gateway.sampling.planner import Arrival
from agentlightning.gateway.sampling.sampler import Emit
from agentlightning.gateway.serving.http import (
    DisconnectedError,
    Receive,
    Send,
    cancel_when_gone,
    left_out_header,
    send_body,
    send_part,
)
from agentlightning.rendering import Rendering

T = TypeVar("T")
logger = logging.getLogger(__name__)

_GONE = object()
_LONG = 5000
"""Log-probs and characters up to which an answer is written on the event loop; it takes a few milliseconds."""


class Target(Protocol):
    """Whatever answers requests from tokens: an engine behind a sampler."""

    @property
    def rendering(self) -> Rendering: ...

    @property
    def scores_prompts(self) -> bool:
        """Whether log-probs of a prompt's tokens are to be had."""
        ...

    async def answer(self, arrival: Arrival, emit: Emit | None) -> Answer: ...

    @property
    def measure(self) -> Measure | None:
        """What the length of large requests is checked by; None where that cannot be done in another process."""
        ...

    async def count(self, request: CallRequest, live: LiveAttempt) -> int:
        """How many tokens a request's prompt has."""
        ...


class Exchange:
    """One request on its way: sampling in a task, sending here, whichever ends first."""

    def __init__(
        self,
        dialect: Dialect,
        target: Target,
        arrival: Arrival,
        admitted: AbstractAsyncContextManager[None],
        keep_alive_seconds: float,
    ) -> None:
        self._dialect = dialect
        self._target = target
        self._arrival = arrival
        self._admitted = admitted
        self._keep_alive = keep_alive_seconds
        self._headers = left_out_header(arrival.request.left_out)

    async def run(self, receive: Receive, send: Send) -> None:
        events: asyncio.Queue[Any] | None = asyncio.Queue() if self._arrival.request.stream else None
        work = asyncio.create_task(self._work(None if events is None else events.put_nowait))
        if events is not None:  # however it ends, and even if it is cancelled before it begins
            work.add_done_callback(lambda _: events.put_nowait(_GONE))
        gone = asyncio.create_task(cancel_when_gone(receive, work))
        _run_with(self._arrival.live.running, work)
        try:
            if events is None:
                await self._answer(work, send)
            else:
                await self._stream(events, work, send)
        finally:
            gone.cancel()
            work.cancel()

    async def _work(self, emit: Emit | None) -> Answer:
        async with self._admitted:
            reply = await self._target.answer(self._arrival, emit)
        remember = self._arrival.request.remember
        if remember is not None:
            self._arrival.live.answered[reply.response_id] = [*remember, reply.choices[0].message()]
        return reply

    async def _answer(self, work: asyncio.Task[Answer], send: Send) -> None:
        await asyncio.wait([work])
        outcome = _outcome(work)
        if isinstance(outcome, Refusal):
            await send_body(send, outcome.status, self._dialect.refuse(outcome), self._headers)
        else:
            parts = self._arrival.request, outcome, self._target.rendering
            respond = self._dialect.respond
            body = await in_background(respond, *parts) if _is_long(*parts[:2]) else respond(*parts)
            await send_body(send, 200, body, self._headers)

    async def _stream(self, events: asyncio.Queue[Any], work: asyncio.Task[Answer], send: Send) -> None:
        """Headers wait for the first token, so that a request that is refused gets its status code."""
        begin, first = await events.get(), None
        if begin is not _GONE:
            first = await _next(events, self._keep_alive)
        if begin is _GONE or first is _GONE:
            outcome = _outcome(await _finished(work))
            if isinstance(outcome, Refusal):
                await send_body(send, outcome.status, self._dialect.refuse(outcome), self._headers)
                return
        arrival = self._arrival
        writer = self._dialect.writer(arrival.request, arrival.response_id, int(arrival.start), self._target.rendering)
        media_type = self._dialect.media_type(arrival.request).encode()
        headers = [(b"content-type", media_type), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": [*headers, *self._headers]})
        await send_part(send, writer.start(begin.prompt_tokens))
        event = first
        while event is not _GONE:
            await send_part(send, self._dialect.keep_alive if event is None else _written(writer, event))
            event = await _next(events, self._keep_alive)
        outcome = _outcome(await _finished(work))
        last = writer.fail(outcome) if isinstance(outcome, Refusal) else writer.finish(outcome)
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _is_long(request: CallRequest, answer: Answer) -> bool:
    """Whether writing an answer would hold up others."""
    numbers = 1 + request.top_logprobs if request.logprobs else 0
    size = sum(numbers * len(choice.ids) + len(choice.content) for choice in answer.choices)
    return (
        size + (1 + (request.scores_prompt or 0)) * answer.prompt_tokens * (request.scores_prompt is not None) > _LONG
    )


async def _next(events: asyncio.Queue[Any], seconds: float) -> Any:
    """The next event; None if there was none for a while."""
    if not events.empty():
        return events.get_nowait()
    try:
        async with asyncio.timeout(seconds):
            return await events.get()
    except TimeoutError:
        return None


async def _finished(work: asyncio.Task[Answer]) -> asyncio.Task[Answer]:
    await asyncio.wait([work])
    return work


def _outcome(work: asyncio.Task[T]) -> T | Refusal:
    """What became of a request."""
    if work.cancelled():
        return _ended()
    error = work.exception()
    return work.result() if error is None else refusal_for(error)


def _ended() -> Refusal:
    return Refusal("The attempt or the gateway ended before this call did.", status=410, code="attempt_closed")


def refusal_for(error: BaseException) -> Refusal:
    """The refusal that a client gets for an error; a bug is logged, and becomes a server error."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, StoreError):
        return Refusal(f"The store does not answer: {error}", status=503, kind="server_error", code="store_unavailable")
    if isinstance(error, UNUSABLE):
        logger.info("A model call holds a value that cannot be used.", exc_info=error)
        return unusable(error)
    logger.error("Answering a model call failed.", exc_info=error)
    return Refusal(
        f"The gateway failed on this call ({type(error).__name__}: {error}). Its log has the details.",
        status=500,
        kind="server_error",
        code="internal_error",
    )


def _written(writer: StreamWriter, event: Delta | Choice) -> bytes:
    return writer.delta(event) if isinstance(event, Delta) else writer.choice(event)


Forwarding = AbstractAsyncContextManager[tuple[int, list[tuple[bytes, bytes]], AsyncIterator[bytes]]]


class Relay:
    """One request that another provider answers: its bytes go through."""

    def __init__(
        self,
        dialect: Dialect,
        forwarding: Forwarding,
        running: set[asyncio.Task[Any]],
        admitted: AbstractAsyncContextManager[None],
    ) -> None:
        self._dialect = dialect
        self._forwarding = forwarding
        self._running = running
        self._admitted = admitted
        self._started = False

    async def run(self, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(send))
        gone = asyncio.create_task(cancel_when_gone(receive, work))
        _run_with(self._running, work)
        try:
            await asyncio.wait([work])
        finally:
            gone.cancel()
            work.cancel()
        outcome = None if work.cancelled() or work.exception() is None else _outcome(work)
        if isinstance(outcome, Refusal):
            if self._started:  # the client sees that the body is cut off
                raise outcome
            await send_body(send, outcome.status, self._dialect.refuse(outcome))

    async def _work(self, send: Send) -> None:
        async with self._admitted, self._forwarding as (status, headers, pieces):
            await send({"type": "http.response.start", "status": status, "headers": headers})
            self._started = True
            async for piece in pieces:
                await send_part(send, piece)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, running: set[asyncio.Task[Any]], work: Coroutine[Any, Any, T]) -> T:
    """The result of work that a client waits for. Raises `DisconnectedError` when the client goes away."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(cancel_when_gone(receive, task))
    _run_with(running, task)
    try:
        await asyncio.wait([task])
        if task.cancelled() and gone.done():
            raise DisconnectedError
    finally:
        gone.cancel()
        task.cancel()
    if task.cancelled():
        raise _ended()
    return task.result()


def _run_with(running: set[asyncio.Task[Any]], work: asyncio.Task[Any]) -> None:
    running.add(work)
    work.add_done_callback(running.discard)
