"""What is taken off a response before it is an answer: stop strings and tokens, and what its client began it with. And
a request of several raw prompts: one request for each of them, and one stream for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from agentlightning.engine.base import Chunk
from agentlightning.gateway.exchange import Begin, Choice, Delta
from agentlightning.gateway.sampling.planner import Arrival, PlannedRequest
from agentlightning.types.arrays import Int32Array


def split_prompt(planned: PlannedRequest) -> tuple[Int32Array, Int32Array]:
    """A prompt up to where the answer begins, and what the client began it with."""
    at = len(planned.prompt_ids) - planned.begun
    return planned.prompt_ids[:at], planned.prompt_ids[at:]


def text_after(begun: str, content: str) -> str:
    """A text without what it began with; the parser has taken white space off its start."""
    begun_text = begun.strip()
    if not content.startswith(begun_text):
        return content
    return content[len(begun_text) :].removeprefix(begun[len(begun.rstrip()) :])


def without_stop(ids: Int32Array, stops: Sequence[int]) -> Int32Array:
    """The tokens of a response without the one that ended it."""
    return ids[:-1] if len(ids) and int(ids[-1]) in stops else ids


def without_tokens(whole: Chunk) -> Chunk:
    """A response without its tokens, for a client that wanted none."""
    none = slice(0, 0)
    return msgspec.structs.replace(
        whole,
        ids=whole.ids[none],
        logprobs=whole.logprobs[none],
        plain_logprobs=whole.plain_logprobs[none],
        top_ids=None,
        top_logprobs=None,
        kept=None,
        finish_reason="length",
        stop_string=None,
    )


def cut_at_stop(text: str, stop: str | None, shown: bool) -> str:
    """The text before the stop string that ended it, or up to it where it is shown."""
    if stop is None:
        return text
    before, found, _ = text.partition(stop)
    return before + found if shown else before


Emit = Callable[[Begin | Delta | Choice], None]
"""Takes the events of a stream: its beginning, deltas, and each choice when it is whole."""


class ChoiceStream:
    """A stream of the choices of all prompts, which begins with the first one that may be sampled."""

    def __init__(self, emit: Emit, prompt_tokens: int, n: int) -> None:
        self._emit = emit
        self._prompt_tokens = prompt_tokens
        self._n = n
        self._begun = False

    def of_prompt(self, at: int) -> Emit:
        """Takes the events of the prompt in this place; the first one begins the stream."""
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
