"""Reading a request's body: here if it is small, in the process for large requests otherwise."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.dialects import DIALECTS, FORWARDED, DialectRoute
from agentlightning.gateway.dialects.fields import check_strict, required
from agentlightning.gateway.exchange import CallRequest, Refusal
from agentlightning.gateway.history.answers import Answered
from agentlightning.gateway.large.requests import LargeRequests, sent_prompts
from agentlightning.gateway.large.wire import Counted, Measure, Read, RefusedRequest
from agentlightning.gateway.limits import RequestLimits, checked, decode, in_background
from agentlightning.gateway.prompts import with_prompts
from agentlightning.gateway.recording.records import Place
from agentlightning.gateway.routing.upstream import Upstream
from agentlightning.gateway.sampling.served import as_served
from agentlightning.gateway.serving.answering import Target, while_connected
from agentlightning.gateway.serving.http import Receive
from agentlightning.gateway.stable_prefix import parse_stable
from agentlightning.types.call import LeftOut

logger = logging.getLogger(__name__)

_MOST_RECALLED = 8
"""Answers of one request; each time it is read anew."""
_GONE = ("previous_response_not_found", "item_not_found")
_MOST_WARNED = 64
"""Parts of requests that are warned of: clients name some of them, and can make up any number."""


class Router(Protocol):
    """Which target a model name means."""

    def target(self, model: str) -> Target | Upstream:
        """Raises `Refusal` for an unknown model."""
        ...

    def names(self) -> Sequence[str]: ...

    @property
    def takes_any_name(self) -> bool: ...

    def measures(self) -> Mapping[str, Measure]:
        """Of the models whose requests can be read in another process, by all names that mean them."""
        ...


@dataclass(slots=True)
class Incoming:
    """A request of an attempt that is yet to be read."""

    route: DialectRoute
    body: bytes
    live: LiveAttempt
    place: Place
    knows_models: bool
    """False for a client that was given nothing but a URL, and where there is one model only: a name that it makes up
    means the first model."""
    model: str = "unknown"
    """What is asked, once it is known."""


class Reader:
    """Reads requests."""

    def __init__(self, router: Router, limits: RequestLimits, large: LargeRequests, *, strict: bool) -> None:
        self._router = router
        self._limits = limits
        self._large = large
        self._strict = strict
        self._warned: set[str] = set()
        self.warn: Callable[[str], None] = lambda text: logger.warning("%s", text)

    async def read(self, incoming: Incoming, receive: Receive) -> CallRequest | int | Mapping[str, Any]:
        """What a request asks; how many tokens it has, where that is all it asks and is known by now; or the body as it
        is, if another provider is asked. Sets `incoming.model`. Raises `Refusal`.
        """
        found = await self._recalled(incoming, receive)
        if not isinstance(found, CallRequest):
            return found
        target = self._router.target(incoming.model)
        request = found if isinstance(target, Upstream) else self._served(found, target)
        if self._strict:
            check_strict(request.left_out)
        self._warn(request.left_out)
        return request

    def _warn(self, left_out: Sequence[LeftOut]) -> None:
        """Say once, at the first call that has it, which part of a request the model does not get."""
        for one in left_out:
            if one.kind == "unavailable" and one.field not in self._warned and len(self._warned) < _MOST_WARNED:
                self._warned.add(one.field)
                self.warn(f"Left out of a request: {one.field}. Reason: {one.why}. The model answers without it.")

    def _served(self, request: CallRequest, target: Target) -> CallRequest:
        return as_served(request, target.rendering, scores_prompts=target.scores_prompts)

    async def _recalled(self, incoming: Incoming, receive: Receive) -> CallRequest | int | Mapping[str, Any]:
        """What a request asks; earlier answers that it goes on from are brought back to memory, if they have left."""
        for _ in range(_MOST_RECALLED):
            try:
                return await self._read(incoming, receive)
            except Refusal as refusal:
                answered = incoming.live.answered
                left = answered.take_missed() if isinstance(answered, Answered) else None
                if refusal.wire_code not in _GONE or left is None or incoming.live.recall is None:
                    raise
            await incoming.live.recall(f"{left}:0")
        return await self._read(incoming, receive)

    async def _read(self, incoming: Incoming, receive: Receive) -> CallRequest | int | Mapping[str, Any]:
        large = self._limits.is_large(incoming.body)
        if large and incoming.route.dialect in DIALECTS:
            measures = self._router.measures()
            found = await self._read_in_process(incoming, receive, measures) if measures else None
            if found is not None:
                return found
        return await self._read_here(incoming, large=large)

    async def _read_here(self, incoming: Incoming, *, large: bool) -> CallRequest | Mapping[str, Any]:
        body, live = incoming.body, incoming.live
        given = incoming.route.read(await in_background(checked, body, self._limits) if large else decode(body))
        if live.prompts and not incoming.place.judge:
            given = with_prompts(incoming.route.dialect.name, given, live.prompts, incoming.place.agent)
        incoming.model = required(given, "model", str)
        if not incoming.knows_models and incoming.model not in self._router.names():
            incoming.model = self._router.names()[0]
        only_forwarded = incoming.route.dialect in FORWARDED and incoming.model not in self._router.names()
        if not only_forwarded and isinstance(self._router.target(incoming.model), Upstream):
            return given
        arguments = incoming.route.dialect, given, live.answered
        request = await in_background(parse_stable, *arguments) if large else parse_stable(*arguments)
        self._limits.check_stops(request.asked.get("stop", ()))
        return request

    async def _read_in_process(
        self, incoming: Incoming, receive: Receive, measures: Mapping[str, Measure]
    ) -> CallRequest | int | None:
        """None where only this process can read it."""
        live, place = incoming.live, incoming.place
        read = Read(
            dialect=incoming.route.dialect.name,
            path=incoming.route.path,
            query=incoming.route.query,
            counting=incoming.route.counting,
            limits=self._limits,
            strict=self._strict,
            models=measures,
            names=() if incoming.knows_models else self._router.names(),
            prompts=() if place.judge else sent_prompts(live.prompts),
            agent=place.agent,
            answered={},
        )
        work = self._large.read(live.key, read, [incoming.body], live.answered)
        found = await while_connected(receive, live.running, work)
        match found:
            case RefusedRequest():
                incoming.model = found.model
                if found.too_long and not read.counting:
                    live.mark_limited(found.message)
                raise found.refusal()
            case Counted():
                return found.tokens
            case (str(model), CallRequest() as request):
                incoming.model = model
                return request
            case _:
                return None
