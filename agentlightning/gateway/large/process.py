"""The process for large requests, as the gateway sees it. It answers one question at a time.

Who waits for an answer in vain is told so, and may ask again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

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
from agentlightning.net.supervisor import HelperLost, Supervisor
from agentlightning.rendering.base import RenderingSource

logger = logging.getLogger(__name__)

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
        self.helper = Supervisor("agentlightning.gateway.large", _ENVIRONMENT, stop=encoded(StopAnswering()))
        self._loaded: WeakKeyDictionary[HelperProcess, set[RenderingSource]] = WeakKeyDictionary()
        self._closed = False

    async def ask(self, owner: Hashable, question: Question, body: Sequence[bytes] = ()) -> Answer:
        """The answer to a question. Owners take turns. Raises `Refusal` if the process does not live to answer it."""
        try:
            answer = await self.helper.run(owner, partial(self._answered, owner, question, body))
        except HelperLost as lost:
            raise _stopped() if self._closed else _lost(lost, question) from None
        except OSError as error:
            raise _not_started(error) from error
        if isinstance(answer, Broken):
            raise _broken(answer)
        return answer

    async def close(self) -> None:
        self._closed = True
        await self.helper.close()

    async def _answered(
        self, owner: Hashable, question: Question, body: Sequence[bytes], process: HelperProcess
    ) -> Answer:
        loaded = self._loaded.setdefault(process, set())
        for source in _sources(question) - loaded:
            answer = await _exchange(process, Load(source), (), _LOADING)
            if isinstance(answer, Unloadable | Broken):
                return answer
            loaded.add(source)
        began = time.perf_counter()
        try:
            return await _exchange(process, question, body, _limit_of(question, self._limits))
        finally:
            self._charge(owner, time.perf_counter() - began)


async def _exchange(process: HelperProcess, question: Question, body: Sequence[bytes], limit: _Limit) -> Answer:
    try:
        async with asyncio.timeout(limit.seconds):
            await process.send(encoded(question), body)
            return answer_of.decode(await process.receive())
    except TimeoutError:
        raise _slow(limit) from None


def _sources(question: Question) -> set[RenderingSource]:
    """The renderings that a question needs."""
    if isinstance(question, Read):
        return {measure.source for measure in question.models.values()}
    return {question.source}


def _limit_of(question: Question, limits: RequestLimits) -> _Limit:
    if isinstance(question, MakeGrammar):
        return _Limit(limits.schema_seconds, "schema_seconds")
    return _Limit(limits.large_seconds, "large_seconds")


# ---- why there is no answer ------------------------------------------------------------------------------------------


def _stopped() -> Refusal:
    return Refusal("The gateway was stopped.", status=410, code="attempt_closed")


def _slow(limit: _Limit) -> Refusal:
    return Refusal(
        f"The gateway was busy with this request for more than {limit.seconds:g} s ({limit.name}).",
        status=413,
        code="request_takes_too_long",
    )


def _broken(answer: Broken) -> Refusal:
    if answer.is_request:
        return unusable(answer.why)
    logger.error("Work on a large request failed: %s", answer.why)
    return Refusal(
        f"The gateway failed on this call ({answer.why}).", status=500, kind="server_error", code="internal_error"
    )


def _not_started(error: OSError) -> Refusal:
    logger.error("The gateway's process for large requests cannot be started.", exc_info=error)
    return _try_again(f"cannot be started: {error.strerror}")


def _lost(lost: HelperLost, question: Question) -> Refusal:
    logger.error("The gateway's process for large requests ended %s. The next large request starts it again.", lost)
    if isinstance(question, MakeGrammar):  # it would end it again
        return Refusal(
            "The JSON schemas that the response must follow are too large or too complex to make a grammar of. "
            "Simplify them.",
            code="schema_too_large",
        )
    return _try_again("ended while it was busy with this one")


def _try_again(why: str) -> Refusal:
    return Refusal(
        f"The gateway's process for large requests {why}. Try again.",
        status=503,
        kind="server_error",
        code="large_request_lost",
    )
