"""A request of several raw prompts: one request for each of them, and one stream for all."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from agentlightning.gateway.exchange import Begin, Choice, Delta
from agentlightning.gateway.sampling.planner import Arrival

Emit = Callable[[Begin | Delta | Choice], None]
"""Takes what a stream shows: that it begins, deltas, and each choice when it is whole."""


class ChoiceStream:
    """A stream of the choices of all prompts, which begins with the first one that may be sampled."""

    def __init__(self, emit: Emit, prompt_tokens: int, n: int) -> None:
        self._emit = emit
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._begun = False

    def of_prompt(self, at: int) -> Emit:
        """Takes what is to be shown of the prompt in this place, and begins the stream if nothing did."""
        if not self._begun:
            self._begun = True
            self._emit(Begin(self._prompt_tokens))
        if at == 0:
            return self._emit
        first = at * self._n

        def shifted(event: Begin | Delta | Choice) -> None:
            assert not isinstance(event, Begin), "the stream has begun"
            self._emit(msgspec.structs.replace(event, index=first + event.index))

        return shifted


def each_prompt(arrival: Arrival) -> list[Arrival]:
    """The request as one for each of its raw prompts; all but the first have ids and numbers of their own."""
    request, live = arrival.request, arrival.live
    if not request.prompts:
        return [arrival]
    alone = [
        msgspec.structs.replace(request, prompt=prompt, prompts=[], size=None, measured=False)
        for prompt in request.prompts
    ]
    others = [
        msgspec.structs.replace(
            arrival, request=one, response_id=f"{arrival.response_id}.{at}", number=live.requests + at - 1
        )
        for at, one in enumerate(alone[1:], 1)
    ]
    live.requests += len(others)
    return [msgspec.structs.replace(arrival, request=alone[0]), *others]
