"""The engine's seam: token ids in; token ids, log-probs and weight versions out.

Implementations: the embedded torch engine (in the model process), vLLM servers, other providers.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

import msgspec

from agentlightning.types.arrays import Float32Array, Int32Array, joined_kept, np


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample one response."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """Tokens less probable than this share of the most probable one are left out. 0 is off."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that is in the response already …"""
    frequency_penalty: float = 0.0
    """… and this for each time that it is there."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens. Like a filter, this and the penalties change what a token is drawn from, not
    its plain log-prob."""
    min_tokens: int = 0
    """Before there are so many, no token that ends the response is drawn, as far as a grammar leaves others, and no
    stop string ends it."""
    ignore_eos: bool = False
    """Whether sampling goes on after the model's own end-of-sequence ids."""
    max_tokens: int | None = None
    """None: to the end of the context."""
    stop: tuple[str, ...] = ()
    """Strings that end the response. The tokens that contain the string are part of the sampled ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the response besides the model's own end-of-sequence ids; the id is part of the sampled ids."""
    seed: int | None = None
    """The same seed, prompt and weights give the same response, whatever else the engine is doing."""
    top_logprobs: int = 0
    """How many alternatives to report per token."""
    prompt_logprobs: int | None = None
    """How many alternatives to report per token of the prompt, beside its log-prob (`Chunk.prompt`); None: nothing."""
    grammar: str | None = None
    """What the response must look like, as a grammar of the `llguidance` library."""
    keeps: bool = False
    """Whether to say which tokens top_p, top_k and min_p left to draw from (`Chunk.kept`)."""
    owner: str = ""
    """Who asks, for example an attempt: requests of different owners take turns. Empty: the request is its own."""

    @property
    def shifts_logits(self) -> bool:
        """Whether the logits of some tokens are moved."""
        return bool(self.presence_penalty or self.frequency_penalty or self.logit_bias or self.min_tokens)


class PromptLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """What the model makes of a prompt's tokens but the first, at temperature 1. Arrays have shape [T]."""

    logprobs: Float32Array
    top_ids: Int32Array | None = None
    """Shape [T, K]: alternatives by falling probability, where some were asked for."""
    top_logprobs: Float32Array | None = None


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens sampled since the last chunk. Arrays have shape [T]; a stream's last chunk has a `finish_reason`."""

    ids: Int32Array
    logprobs: Float32Array
    """Under the distribution the token was drawn from."""
    plain_logprobs: Float32Array
    """Under the plain softmax at the same temperature (temperature 1 if greedy)."""
    version: int
    """The weight version that sampled these tokens."""
    top_ids: Int32Array | None = None
    """Shape [T, K]: alternatives by falling probability, under the plain softmax."""
    top_logprobs: Float32Array | None = None
    kept: Int32Array | None = None
    """Which tokens a filter left to draw each of these from, where it was asked for; see `types.arrays`."""
    finish_reason: str | None = None
    """None while sampling goes on, then "stop", "length" or "abort"."""
    stop_string: str | None = None
    """The stop string that ended the response, if one did."""
    cached_tokens: int = 0
    """How many prompt tokens were not computed again."""
    prompt: PromptLogprobs | None = None
    """Where it was asked for, of a prompt with more than one token; on a response's last chunk."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs to know of an engine."""

    model: str
    """Directory or hub id with the tokenizer and chat template."""
    max_context: int
    """Prompt plus response, in tokens."""
    max_concurrency: int
    """Requests sampled at the same time; more wait in a queue."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    version: int
    scores_prompts: bool = False
    """Whether it tells log-probs of a prompt's tokens (`SamplingParams.prompt_logprobs`)."""


class Engine(Protocol):
    """Samples tokens from a policy."""

    async def info(self) -> EngineInfo:
        """What it samples from, and how much it can take."""
        ...

    def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """Sample one response. Yields chunks as they are sampled if `stream`, else one chunk at the end (and one
        before, whenever the weights change on the way).

        Closing the generator or cancelling its task aborts the request. Raises `EngineError` when the engine died and
        `ModelError` when the prompt does not fit.
        """
        ...


def concat(chunks: list[Chunk]) -> Chunk:
    """One chunk from a stream's chunks (the version is the last one's; see `runs` for all)."""
    last = chunks[-1]
    if len(chunks) == 1:
        return last
    return msgspec.structs.replace(
        last,
        ids=np.concatenate([c.ids for c in chunks]),
        logprobs=np.concatenate([c.logprobs for c in chunks]),
        plain_logprobs=np.concatenate([c.plain_logprobs for c in chunks]),
        top_ids=None if last.top_ids is None else np.concatenate([c.top_ids for c in chunks if c.top_ids is not None]),
        top_logprobs=None
        if last.top_logprobs is None
        else np.concatenate([c.top_logprobs for c in chunks if c.top_logprobs is not None]),
        kept=joined_kept([(c.kept, len(c.ids)) for c in chunks]),
    )
