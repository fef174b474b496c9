"""A request for samples as the engine takes it, and its samples as the client reads them.

Shape letters: P tokens of the prompt, K alternatives.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from agentlightning.backend.embedded.client import PolicyHandle
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.finetuning.tinker import bodies
from agentlightning.finetuning.tinker.proto import SampleResponse
from agentlightning.gateway.exchange import Refusal
from agentlightning.types.arrays import Float32Array, Int32Array, np

STOP, LENGTH = 0, 1
MOST_ALTERNATIVES = 64
_EMPTY = -99999.0
"""The log-prob of an alternative that there is not."""


def sampling_params(body: bodies.SamplesRequest, *, owner: str) -> tuple[Int32Array, list[SamplingParams]]:
    """The prompt, and the settings of each sample. Raises `Refusal`."""
    tokens = _prompt_tokens(body)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(body, name) <= MOST_ALTERNATIVES:
            raise Refusal(f"{name} is {getattr(body, name)}; it is from 0 to {MOST_ALTERNATIVES}.", param=name)
    last = body.prompt_logprobs_last_n
    if last is not None and not (body.prompt_logprobs and 1 <= last < len(tokens)):
        raise Refusal(
            "prompt_logprobs_last_n is from 1 to the prompt's tokens less one, and goes with prompt_logprobs.",
            param="prompt_logprobs_last_n",
        )
    given, scores = body.sampling_params, bool(body.prompt_logprobs or body.topk_prompt_logprobs)
    texts, ids, ignores_eos = _stops(given.stop)
    if not (0 <= given.temperature < math.inf and 0 < given.top_p <= 1 and (given.top_k == -1 or given.top_k >= 1)):
        raise Refusal(
            "sampling_params: temperature is at least 0, top_p above 0 and at most 1, top_k at least 1 or -1.",
            param="sampling_params",
        )
    common = SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=max(given.top_k, 0),
        max_tokens=given.max_tokens,
        stop=texts,
        stop_token_ids=ids,
        ignore_eos=ignores_eos,
        top_logprobs=body.topk_sample_logprobs,
        owner=owner,
    )
    params: list[SamplingParams] = []
    for i in range(body.num_samples):
        seed = None if given.seed is None else (given.seed + i) % 2**63
        prompt_logprobs = body.topk_prompt_logprobs if scores and i == 0 else None
        params.append(msgspec.structs.replace(common, seed=seed, prompt_logprobs=prompt_logprobs))
    return np.array(tokens, dtype=np.int32), params


def _prompt_tokens(body: bodies.SamplesRequest) -> list[int]:
    tokens: list[int] = []
    for chunk in body.prompt.chunks:
        if chunk.type != "encoded_text" or chunk.tokens is None:
            raise Refusal(
                f"prompt has a chunk of the type {chunk.type[:50]!r}; this server has text models.", param="prompt"
            )
        tokens += chunk.tokens
    if not tokens or not all(0 <= token < 2**31 for token in tokens):
        raise Refusal("prompt has no token, or one that is no token id.", param="prompt")
    return tokens


def _stops(stop: str | Sequence[str | int] | None) -> tuple[tuple[str, ...], tuple[int, ...], bool]:
    """Texts and ids that end a sample, and whether the model's own end does not: an empty list is none at all."""
    if stop is None:
        return (), (), False
    if isinstance(stop, str):
        return (stop,), (), False
    texts = tuple(one for one in stop if isinstance(one, str))
    ids = tuple(one for one in stop if isinstance(one, int))
    return texts, ids, not stop


def sample_response(body: bodies.SamplesRequest, length: int, chunks: Sequence[Chunk]) -> bytes:
    """A SampleResponse. Log-probs are over the whole vocabulary, at the request's temperature; those of the prompt at
    temperature 1."""
    response = SampleResponse(prompt_cache_hit_tokens=chunks[0].cached_tokens)
    for chunk in chunks:
        sequence = response.sequences.add(
            stop_reason=LENGTH if chunk.finish_reason == "length" else STOP,
            tokens=chunk.ids.astype(np.int32).tobytes(),
            logprobs=chunk.plain_logprobs.astype(np.float32).tobytes(),
        )
        if body.topk_sample_logprobs and chunk.top_ids is not None and chunk.top_logprobs is not None:
            _write_top(sequence.topk_sampled_logprobs, chunk.top_ids, chunk.top_logprobs)
    if body.prompt_logprobs or body.topk_prompt_logprobs:
        _write_prompt(response, body, length, chunks[0])
    return response.SerializeToString()


def _write_prompt(response: Any, body: bodies.SamplesRequest, length: int, chunk: Chunk) -> None:
    """Nothing is known of the first token, and nothing returned for tokens before the last ones that were asked for."""
    silent = length - (body.prompt_logprobs_last_n or length - 1)
    logprobs_P = np.full(length, np.nan, dtype=np.float32)
    if chunk.prompt is not None:
        logprobs_P[1:] = chunk.prompt.logprobs
    logprobs_P[:silent] = np.nan
    if body.prompt_logprobs:
        response.prompt_logprobs = logprobs_P.tobytes()
    k = body.topk_prompt_logprobs
    if k and chunk.prompt is not None and chunk.prompt.top_ids is not None and chunk.prompt.top_logprobs is not None:
        ids_PK = np.zeros((length, k), dtype=np.int32)
        top_PK = np.full((length, k), _EMPTY, dtype=np.float32)
        ids_PK[1:], top_PK[1:] = chunk.prompt.top_ids[:, :k], chunk.prompt.top_logprobs[:, :k]
        ids_PK[:silent], top_PK[:silent] = 0, _EMPTY
        _write_top(response.topk_prompt_logprobs, ids_PK, top_PK)


def _write_top(message: Any, ids: Int32Array, logprobs: Float32Array) -> None:
    message.token_ids = np.ascontiguousarray(ids, dtype=np.int32).tobytes()
    message.logprobs = np.ascontiguousarray(logprobs, dtype=np.float32).tobytes()
    message.length, message.k = ids.shape


async def sample_all(handle: PolicyHandle, prompt: np.ndarray, params: Sequence[SamplingParams]) -> list[Chunk]:
    """A response for each of the settings, or the first error; then what is left of the others is ended."""

    async def sample(one: SamplingParams) -> Chunk:
        return concat([chunk async for chunk in handle.generate(prompt, one)])

    tasks = [asyncio.ensure_future(sample(one)) for one in params]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
