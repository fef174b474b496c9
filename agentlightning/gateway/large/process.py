"""The process for large requests, as the gateway sees it: started when it is first needed, again when it has died.

It answers one question at a time. Who waits for an answer in vain is told so, and may ask again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from agentlightning.gateway.exchange import Refusal, unusable
from agentlightning.gateway.large.wire import (
    Answer,
    Broken,
    Load,
    MakeGrammar,
    Question,
    Read,
    StopAnswering,
    Unloadable,
    answer_of,
    encoded,
)
from agentlightning.gateway.limits import RequestLimits
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.places import Places
from agentlightning.rendering.base import RenderingSource

logger = logging.getLogger(__name__)

_STOP_SECONDS = 2.0
"""How long it may go on with what nobody waits for."""
# What has been fetched from the hub is on the disk, and one core is enough.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class _Limit(NamedTuple):
    """How long the answer to one question may take, and the setting that says so."""

    seconds: float
    name: str


_LOADING = _Limit(120.0, "to load a model's tokenizer")


class LargeProcess:
    """Asked by `ask`, from one event loop; `close` ends it."""

    def __init__(self, limits: RequestLimits, charge: Callable[[Hashable, float], None] = lambda *_: None) -> None:
        """`charge` is told how long the process was busy with a question, and whose it was."""
        self._limits = limits
        self._charge = charge
        self._places = Places(1)
        self._running: asyncio.Task[_Running] | None = None
        self._asking: set[asyncio.Task[Answer]] = set()
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, if there is one."""
        started = self._running is not None and self._running.done() and self._running.exception() is None
        return self._running.result().process.pid if self._running is not None and started else None

    async def ask(self, owner: Hashable, question: Question, body: Sequence[bytes] = ()) -> Answer:
        """The answer to a question. Owners take turns. Raises `Refusal` if the process does not live to answer it."""
        async with self._places.one(owner):
            running = await self._started()
            for source in _sources(question) - running.loaded:
                loaded = await self._ask(running, Load(source), (), _LOADING)
                if isinstance(loaded, Unloadable):
                    return loaded
                running.loaded.add(source)
            began = time.perf_counter()
            try:
                return await self._ask(running, question, body, _limit_of(question, self._limits))
            finally:
                self._charge(owner, time.perf_counter() - began)

    async def _ask(self, running: _Running, question: Question, body: Sequence[bytes], limit: _Limit) -> Answer:
        asking = asyncio.create_task(running.ask(question, body))
        self._asking.add(asking)
        asking.add_done_callback(self._done)
        try:
            async with asyncio.timeout(limit.seconds):
                return await asyncio.shield(asking)
        except TimeoutError:
            await self._end(running)
            raise _slow(limit) from None
        except asyncio.CancelledError:
            await self._stop(running, asking)
            raise
        except (ConnectionError, EOFError):
            raise _died(await self._end(running), question) from None

    async def close(self) -> None:
        self._closed = True
        if self._running is not None:
            await asyncio.wait([self._running])
            if self._running.exception() is None:
                await self._end(self._running.result())
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _started(self) -> _Running:
        if self._closed:
            raise Refusal("The gateway was stopped.", status=410, code="attempt_closed")
        started = self._running
        if started is not None and started.done() and started.exception() is None and started.result().process.ended:
            await self._end(started.result())
        if self._running is None:
            self._running = asyncio.create_task(_Running.start())
        try:
            return await asyncio.shield(self._running)
        except OSError as error:
            self._running = None
            logger.exception("The gateway's process for large requests cannot be started.")
            raise Refusal(
                f"The gateway's process for large requests cannot be started: {error.strerror}. Try again.",
                status=503,
                kind="server_error",
                code="large_request_lost",
            ) from error

    async def _end(self, running: _Running) -> str:
        """End it if it lives, and say how it ended."""
        self._running = None
        return await running.process.death()

    def _done(self, asking: asyncio.Task[Answer]) -> None:
        self._asking.discard(asking)
        if not asking.cancelled():
            asking.exception()  # where nobody waited for it, nobody is told

    async def _stop(self, running: _Running, asking: asyncio.Task[Answer]) -> None:
        """Nobody waits for this answer. It is waited for nevertheless: the next question is answered after it."""
        running.stop()
        await asyncio.wait([asking], timeout=_STOP_SECONDS)
        if not asking.done():
            await self._end(running)


class _Running:
    """One process from its start to its end."""

    def __init__(self, process: HelperProcess) -> None:
        self.process = process
        self.loaded: set[RenderingSource] = set()
        self._sending = False
        self._stopped = False

    @classmethod
    async def start(cls) -> _Running:
        return cls(await HelperProcess.start("agentlightning.gateway.large", _ENVIRONMENT))

    async def ask(self, question: Question, body: Sequence[bytes]) -> Answer:
        self._sending, self._stopped = True, False
        await self.process.send(encoded(question), body)
        self._sending = False
        if self._stopped:
            self._say_stop()
        answer = answer_of.decode(await self.process.receive())
        if isinstance(answer, Broken) and answer.is_request:
            raise unusable(answer.why)
        if isinstance(answer, Broken):
            logger.error("Work on a large request failed: %s", answer.why)
            raise Refusal(
                f"The gateway failed on this call ({answer.why}).",
                status=500,
                kind="server_error",
                code="internal_error",
            )
        return answer

    def stop(self) -> None:
        """Nobody waits for the answer. Said once the question is there as a whole."""
        self._stopped = True
        if not self._sending:
            self._say_stop()

    def _say_stop(self) -> None:
        self.process.send_soon(encoded(StopAnswering()))


def _sources(question: Question) -> set[RenderingSource]:
    """The renderings that a question needs."""
    if isinstance(question, Read):
        return {measure.source for measure in question.models.values()}
    return {question.source}


def _limit_of(question: Question, limits: RequestLimits) -> _Limit:
    if isinstance(question, MakeGrammar):
        return _Limit(limits.schema_seconds, "schema_seconds")
    return _Limit(limits.large_seconds, "large_seconds")


def _slow(limit: _Limit) -> Refusal:
    return Refusal(
        f"The gateway was busy with this request for more than {limit.seconds:g} s ({limit.name}).",
        status=413,
        code="request_takes_too_long",
    )


def _died(how: str, question: Question) -> Refusal:
    logger.error("The gateway's process for large requests ended %s. The next large request starts it again.", how)
    if isinstance(question, MakeGrammar):  # it would end it again
        return Refusal(
            "The JSON schemas that the response must follow are too large or too complex to make a grammar of. "
            "Simplify them.",
            code="schema_too_large",
        )
    return Refusal(
        "The gateway's process for large requests ended while it was busy with this one. Try again.",
        status=503,
        kind="server_error",
        code="large_request_lost",
    )
