"""What is taken off a response before it is an answer: stop strings and tokens, and what its client began it with."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from agentlightning.engine.base import Chunk
from agentlightning.gateway.sampling.planner import PlannedRequest
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
    """What is left of a response that nobody wanted."""
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
