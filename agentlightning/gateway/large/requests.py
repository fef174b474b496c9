"""What the gateway asks its process for large requests: to read, tokenise and measure what would hold up the event
loop.

The process answers one question at a time; a client whose question it could not answer gets an error that says so, and
may ask again. It loads renderings by their source and knows the dialects that ship. A rendering or a dialect of
somebody's own lives in the gateway's process only: there a thread does the work, which takes the interpreter from the
others now and then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from agentlightning.errors import ModelError
from agentlightning.gateway.dialects.base import Answered
from agentlightning.gateway.exchange import CallRequest, Refusal, unusable
from agentlightning.gateway.history.session import Bridging
from agentlightning.gateway.large.wire import (
    Answer,
    Bridge,
    Broken,
    Encode,
    Exceeds,
    Flag,
    Grammar,
    Impossible,
    Load,
    MakeGrammar,
    Measure,
    NeedsHistory,
    PromptFields,
    Question,
    Read,
    RefusedRequest,
    Render,
    StopAnswering,
    Taken,
    TokenIds,
    Unloadable,
    answer_of,
    encoded,
    messages_of,
)
from agentlightning.gateway.limits import RequestLimits, in_background
from agentlightning.gateway.prompts import KINDS, Injected
from agentlightning.gateway.sampling.constraint import FormConstraint, grammar_of
from agentlightning.net.backoff import Backoff
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.supervisor import HelperLost, Supervisor
from agentlightning.rendering import RenderersRendering, Rendering
from agentlightning.rendering.base import RenderingSource
from agentlightning.rendering.messages import Message, Tool
from agentlightning.types.arrays import Int32Array, int32_array, int32_bytes

logger = logging.getLogger(__name__)

_MOST_WANTED = 8
"""Earlier answers that the process is given for a request. A request that refers to more is read in this process."""


class LargeRequests:
    """Reads and tokenises what would hold up the event loop. `owner`: the attempt, which takes turns with others."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.backoff = Backoff(limits.refused_wait)
        self.process = _LargeProcess(limits, self.backoff.charge)
        self._unloadable: set[RenderingSource] = set()

    async def close(self) -> None:
        await self.process.close()

    def measure(self, rendering: Rendering, max_context: int, *, refuses: bool) -> Measure | None:
        """What the process needs to check the length of a request; None where it cannot."""
        source = self._source(rendering)
        return None if source is None else Measure(source, max_context, refuses)

    async def read(
        self, owner: Hashable, read: Read, body: Sequence[bytes], answered: Answered
    ) -> Answer | tuple[str, CallRequest]:
        """The model and the request that a body asks for, or why that cannot be said."""
        found = await self.process.ask(owner, read, body)
        known: dict[str, list[Message] | None] = {}
        while isinstance(found, NeedsHistory) and len(known) < _MOST_WANTED:
            history = answered.get(found.response_id)
            known[found.response_id] = None if history is None else list(history)
            found = await self.process.ask(owner, msgspec.structs.replace(read, answered=known), body)
        if isinstance(found, Unloadable):
            for measure in read.models.values():
                self._give_up(measure.source, found.why)
        return (found.model, await _whole(found)) if isinstance(found, Taken) else found

    async def render(
        self, owner: Hashable, rendering: Rendering, messages: Sequence[Message], tools: Sequence[Tool] | None
    ) -> Int32Array:
        """`Rendering.render`."""
        source = self._source(rendering)
        if source is not None:
            found = await self._ask(owner, source, Render(source, messages, tools))
            if isinstance(found, TokenIds) and found.ids is not None:
                return int32_array(found.ids)
        return await in_background(rendering.render, messages, tools)

    async def bridge(self, owner: Hashable, rendering: Rendering, bridging: Bridging) -> Int32Array | None:
        """`Rendering.bridge`."""
        source = self._source(rendering.with_arguments(bridging.arguments))
        if source is not None:
            sent = Bridge(
                source,
                int32_bytes(bridging.prompt_ids),
                int32_bytes(bridging.response_ids),
                bridging.messages,
                bridging.tools,
                bridging.keep_reasoning,
            )
            found = await self._ask(owner, source, sent)
            if isinstance(found, TokenIds):
                return None if found.ids is None else int32_array(found.ids)
        return await in_background(bridging.by, rendering)

    async def encode(self, owner: Hashable, rendering: Rendering, text: str) -> Int32Array:
        """`Rendering.encode`."""
        source = self._source(rendering)
        if source is not None:
            found = await self._ask(owner, source, Encode(source, text))
            if isinstance(found, TokenIds) and found.ids is not None:
                return int32_array(found.ids)
        return await in_background(rendering.encode, text)

    async def exceeds(self, owner: Hashable, rendering: Rendering, texts: Sequence[str], tokens: int) -> bool:
        """`Rendering.exceeds`."""
        source = self._source(rendering)
        if source is not None:
            found = await self._ask(owner, source, Exceeds(source, texts, tokens))
            if isinstance(found, Flag):
                return found.yes
        gone = threading.Event()
        try:
            return await in_background(rendering.exceeds, texts, tokens, gone.is_set)
        finally:
            gone.set()  # nobody waits any more

    async def grammar(
        self, owner: Hashable, rendering: Rendering, constraint: FormConstraint, in_reasoning: bool
    ) -> str | None:
        """`grammar_of` the constraint."""
        source = self._source(rendering)
        if source is not None:
            work = MakeGrammar(source, constraint, in_reasoning)
            found = await self._ask(owner, source, work)
            if isinstance(found, RefusedRequest):
                raise found.refusal()
            if isinstance(found, Grammar):
                return found.text
        return await in_background(grammar_of, constraint, rendering, in_reasoning)

    async def _ask(self, owner: Hashable, source: RenderingSource, question: Question) -> Answer:
        """Raises `ModelError` as the rendering would."""
        found = await self.process.ask(owner, question)
        if isinstance(found, Impossible):
            raise ModelError(found.why)
        if isinstance(found, Unloadable):
            self._give_up(source, found.why)
        return found

    def _source(self, rendering: Rendering) -> RenderingSource | None:
        if os.name != "posix" or not isinstance(rendering, RenderersRendering):
            return None
        source = rendering.source
        return None if source is None or source.base in self._unloadable else source

    def _give_up(self, source: RenderingSource, why: str) -> None:
        if source.base not in self._unloadable:
            self._unloadable.add(source.base)
            logger.warning("Large requests to %s are handled in the gateway's own process: %s", source.path, why)


async def _whole(taken: Taken) -> CallRequest:
    """The request with its messages. Others get a turn after each piece of them."""
    messages: list[Message] = []
    for piece in taken.pieces:
        messages += messages_of.decode(piece)
        await asyncio.sleep(0)
    start = taken.remembered_from
    settings = dict(taken.request.asked)
    if "stop" in settings:
        settings["stop"] = tuple(settings["stop"])
    return msgspec.structs.replace(
        taken.request, messages=messages, remember=None if start is None else messages[start:], asked=settings
    )


def sent_prompts(prompts: Sequence[Injected]) -> Sequence[PromptFields]:
    """Prompts as they are sent to the process."""
    return [_sent(p) for p in prompts]


def _sent(prompt: Injected) -> PromptFields:
    """A prompt without the fields that a type of the user's own may add."""
    kind, known = next((kind, known) for kind, known in KINDS.items() if isinstance(prompt, known))
    fields = prompt.model_dump(mode="json").items()
    return PromptFields(kind, {name: value for name, value in fields if name in known.model_fields})


# What has been fetched from the hub is on the disk, and one core is enough.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class _Limit(NamedTuple):
    """How long the answer to one question may take, and the setting behind that."""

    seconds: float
    name: str


_LOADING = _Limit(120.0, "to load a model's tokenizer")


class _LargeProcess:
    """The process, asked from one event loop by `ask` and ended by `close`."""

    def __init__(self, limits: RequestLimits, charge: Callable[[Hashable, float], None] = lambda *_: None) -> None:
        """`charge` is called with the owner of each question and the seconds that the process was busy with it."""
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
    if isinstance(question, MakeGrammar):  # the same schemas would end the process again
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
