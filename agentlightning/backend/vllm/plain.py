"""Plain log-probs of tokens that were drawn from a restricted distribution (top_p, top_k, min_p, a grammar).

vLLM gives the log-prob of a token under the distribution it was drawn from: with nothing restricted that is the plain
softmax at the request's temperature, otherwise the renormalised rest. Then the tokens are scored again, by the same
server under the same weights, in one request whose prompt is prompt and response: vLLM gives the log-probs of a
prompt's tokens, at temperature 1.

At another temperature T the plain log-prob of x is log p(x) / T − log Z with Z = Σ p(v)^(1/T). Z is had from any token
of which both are known, so every place is asked for its most probable next token at T: a one-token request each, whose
prompt the prefix cache holds.

Shape letter: T sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from agentlightning.backend.vllm.wire import Logprobs, WireAnswer
from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.errors import EngineError
from agentlightning.types.call import Int32Array

AT_ONCE = 32
"""Tokens that are asked for at the same time."""

Generate = Callable[[Mapping[str, Any]], Awaitable[WireAnswer]]
"""Asks the server and adapter that sampled; the body has `token_ids` and `sampling_params`."""


async def with_plain_logprobs(
    generate: Generate, prompt_ids: Int32Array, chunk: Chunk, params: SamplingParams
) -> Chunk:
    """The chunk with the plain log-probs of its tokens and alternatives. No weights may change meanwhile."""
    if not len(chunk.ids):
        return chunk
    ids_T = chunk.ids.tolist()
    whole, top = [*prompt_ids.tolist(), *ids_T], params.top_logprobs
    rows = await _as_a_prompt(generate, whole, len(ids_T), max(1, top))
    if params.temperature not in (0, 1):
        rows = await _at_temperature(generate, whole, rows, params.temperature)
    found = msgspec.structs.replace(
        chunk, plain_logprobs=np.array([row[i] for row, i in zip(rows, ids_T, strict=True)], dtype=np.float32)
    )
    if not top:
        return found
    ranked = [sorted(row.items(), key=lambda item: (-item[1], item[0]))[:top] for row in rows]
    return msgspec.structs.replace(
        found,
        top_ids=np.array([[i for i, _ in row] for row in ranked], dtype=np.int32),
        top_logprobs=np.array([[p for _, p in row] for row in ranked], dtype=np.float32),
    )


async def _as_a_prompt(generate: Generate, whole: list[int], count: int, top: int) -> list[dict[int, float]]:
    """For each of the last `count` tokens its log-prob and those of the `top` most probable ones, at temperature 1."""
    scoring = {"max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
    answer = await generate({"token_ids": whole, "sampling_params": scoring})
    rows = (answer.prompt_logprobs or [])[-count:]
    if len(rows) != count:
        raise EngineError("vLLM gave no log-probs of a prompt's tokens.")
    return [{int(token): scored.logprob for token, scored in (row or {}).items()} for row in rows]


async def _at_temperature(
    generate: Generate, whole: list[int], rows: list[dict[int, float]], temperature: float
) -> list[dict[int, float]]:
    """The rows at another temperature."""
    # Two log-probs are the sampled token's and the most probable one's.
    slots = asyncio.Semaphore(AT_ONCE)
    settings = {"max_tokens": 1, "temperature": temperature, "logprobs": 2, "detokenize": False}

    async def at_place(place: int, row: dict[int, float]) -> dict[int, float]:
        async with slots:
            answer = await generate({"token_ids": whole[:place], "sampling_params": settings})
        content = (answer.choices[0].logprobs or Logprobs()).content
        assert content, answer
        highest = max(a.logprob for a in (*content[0].top_logprobs, content[0]))
        log_z = max(row.values()) / temperature - highest
        return {token: logprob / temperature - log_z for token, logprob in row.items()}

    first = len(whole) - len(rows)
    return await asyncio.gather(*(at_place(first + t, row) for t, row in enumerate(rows)))
