"""What the gateway asks for with large requests. Where the process cannot do it, a thread does.

The process loads renderings by their source and knows the dialects that ship. A rendering or a dialect of somebody's
own lives in the gateway's process only: with those a large request takes the interpreter from the others now and then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Hashable, Sequence

import msgspec

from agentlightning.errors import ModelError
from agentlightning.gateway.dialects.base import Answered
from agentlightning.gateway.exchange import CallRequest
from agentlightning.gateway.history.session import Bridging
from agentlightning.gateway.large.process import LargeProcess
from agentlightning.gateway.large.wire import (
    Answer,
    Bridge,
    Encode,
    Exceeds,
    Flag,
    Grammar,
    Impossible,
    MakeGrammar,
    Measure,
    NeedsHistory,
    PromptFields,
    Question,
    Read,
    RefusedRequest,
    Render,
    Taken,
    TokenIds,
    Unloadable,
    messages_of,
)
from agentlightning.gateway.limits import RequestLimits, in_background
from agentlightning.gateway.prompts import KINDS, Injected
from agentlightning.gateway.sampling.constraint import FormConstraint, grammar_of
from agentlightning.net.backoff import Backoff
from agentlightning.rendering import RenderersRendering, Rendering
from agentlightning.rendering.base import RenderingSource
from agentlightning.rendering.messages import Message, Tool
from agentlightning.types.arrays import Int32Array, int32_array, int32_bytes

logger = logging.getLogger(__name__)

_MOST_WANTED = 8
"""Earlier answers that the process is given for a request. One that refers to more is read here."""


class LargeRequests:
    """Reads and tokenises what would hold up the event loop. `owner`: the attempt, which takes turns with others."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.backoff = Backoff(limits.refused_wait)
        self.process = LargeProcess(limits, self.backoff.charge)
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
    """Without what a type of the user's own may add."""
    kind, known = next((kind, known) for kind, known in KINDS.items() if isinstance(prompt, known))
    fields = prompt.model_dump(mode="json").items()
    return PromptFields(kind, {name: value for name, value in fields if name in known.model_fields})
