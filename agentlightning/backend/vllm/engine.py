"""A policy's `Engine`: token ids to a vLLM server and back, with log-probs, weight versions and a second try.

vLLM gives the log-prob of a token under the distribution it was drawn from: with nothing restricted that is the plain
softmax at the request's temperature, otherwise (top_p, top_k, min_p, a grammar) the renormalised rest. In that case the
tokens are scored again for their plain log-probs, by the same server under the same weights, in one request whose
prompt is prompt and response: vLLM gives the log-probs of a prompt's tokens, at temperature 1.

At another temperature T the plain log-prob of x is log p(x) / T − log Z with Z = Σ p(v)^(1/T). Z follows from any token
of which both are known, so every position is asked for its most probable next token at T: a one-token request each,
whose prompt the prefix cache holds.

Shape letter: T sampled tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from agentlightning.backend.counters import Counters, Seeds
from agentlightning.backend.fleet import Fleet
from agentlightning.backend.vllm.api import ReplicaLost
from agentlightning.backend.vllm.publication import Gate, RequestTarget, ServerPublication
from agentlightning.backend.vllm.replica import Replica
from agentlightning.backend.vllm.wire import (
    Logprobs,
    WireAnswer,
    chunk_of,
    prompt_of,
    restricts,
    sampling,
    split,
    versions_of,
)
from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.engine.limits import check_bias, check_grammar, check_params, check_prompt
from agentlightning.errors import EngineError
from agentlightning.types.call import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSampling:
    """What the engines of all policies share."""

    fleet: Fleet[Replica]
    gate: Gate
    publication: ServerPublication
    in_flight: Literal["finish", "continue"]
    info: EngineInfo
    """As the learner's process knows the model, with the context that servers have."""
    seeds: Seeds
    counters: Counters = field(default_factory=Counters)


class VLLMEngine:
    """See `Engine`. `version` is that of what was published last."""

    def __init__(self, policy: str, shared: VLLMSampling, version: int = 0) -> None:
        self._policy = policy
        self._shared = shared
        self.version = version

    async def info(self) -> EngineInfo:
        return msgspec.structs.replace(self._shared.info, version=self.version, scores_prompts=True)

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`, and `Fleet.sample` for a replica that is lost."""
        info = self._shared.info
        check_params(params)
        check_prompt(prompt_ids, info.max_context, info.vocab_size)
        check_bias(params, info.vocab_size)
        if params.grammar is not None:
            check_grammar(params.grammar)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._shared.seeds.next())
        async with aclosing(
            self._shared.fleet.sample(prompt_ids, params, lambda one: self._sample(one, prompt_ids, params, stream))
        ) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _sample(
        self, replica: Replica, prompt_ids: Int32Array, params: SamplingParams, stream: bool
    ) -> AsyncGenerator[Chunk, None]:
        """One try on one replica."""
        # A prompt's log-probs come with whole answers only.
        shared, scored = self._shared, restricts(params) or params.prompt_logprobs is not None
        # What is given out in parts, or scored afterwards, must be of one weight version.
        must_finish = shared.in_flight == "finish" or stream or scored
        async with shared.gate.inside(must_finish=must_finish):
            target = shared.publication.target(self._policy)
            body = self._body(prompt_ids, params, target, scored)
            replica.running += 1
            shared.counters.begin()
            try:
                if stream and not scored:
                    async with aclosing(self._parts(replica, body, params, target)) as parts:
                        async for part in parts:
                            yield part
                else:
                    for chunk in await self._whole(replica, body, prompt_ids, params, target):
                        yield chunk
                replica.served += 1
            finally:
                replica.running -= 1
                shared.counters.end()

    def _body(
        self, prompt_ids: Int32Array, params: SamplingParams, target: RequestTarget, scored: bool
    ) -> dict[str, Any]:
        info = self._shared.info
        # Scoring asks for one token behind the response.
        left = max(1, info.max_context - len(prompt_ids) - scored)
        wanted = sampling(params, most_tokens=left, eos_ids=info.eos_ids, seed=params.seed)
        return {**_of(target), "token_ids": prompt_ids.tolist(), "sampling_params": wanted}

    async def _whole(
        self,
        replica: Replica,
        body: dict[str, Any],
        prompt_ids: Int32Array,
        params: SamplingParams,
        target: RequestTarget,
    ) -> list[Chunk]:
        answer = await replica.api.generate(body)
        self._count(answer)
        choice = answer.choices[0]
        versions = versions_of(choice) if target.says_version else [(target.version, 0, 0)]
        chunk = chunk_of(choice, params, version=versions[-1][0], cached_tokens=answer.cached_tokens)
        if restricts(params):
            chunk = await _with_plain_logprobs(
                lambda scoring: replica.api.generate({**_of(target), **scoring}), prompt_ids, chunk, params
            )
        if params.prompt_logprobs is not None:
            prompt = prompt_of(answer, prompt_ids, params.prompt_logprobs)
            chunk = msgspec.structs.replace(chunk, prompt=prompt)
        return split(chunk, versions)

    async def _parts(
        self, replica: Replica, body: dict[str, Any], params: SamplingParams, target: RequestTarget
    ) -> AsyncGenerator[Chunk, None]:
        """No weights change meanwhile: all tokens are of the version that was current at the beginning."""
        last: Chunk | None = None
        cached = 0
        async with aclosing(replica.api.stream(body)) as answers:
            async for answer in answers:
                self._count(answer)
                cached = max(cached, answer.cached_tokens)
                for choice in answer.choices:  # none in the part with the usage, which comes last
                    part = chunk_of(choice, params, version=target.version)
                    if choice.finish_reason is None:
                        yield part
                        continue
                    last = part
                    if target.says_version:
                        _refuse_other(versions_of(choice), target.version)
        if last is None:
            raise ReplicaLost(f"The vLLM server at {replica.api.url} ended an answer half-way.")
        yield msgspec.structs.replace(last, cached_tokens=cached)

    def _count(self, answer: WireAnswer) -> None:
        if answer.usage is None:
            return
        counters = self._shared.counters
        counters.sampled += answer.usage.completion_tokens or 0
        counters.cached += answer.cached_tokens
        counters.prefilled += max(0, answer.usage.prompt_tokens - answer.cached_tokens)


def _of(target: RequestTarget) -> dict[str, Any]:
    return {} if target.adapter is None else {"model": target.adapter}


def _refuse_other(versions: Sequence[tuple[int, int, int]], wanted: int) -> None:
    if other := {version for version, _, _ in versions} - {wanted}:
        raise EngineError(
            f"A response that was to be sampled by weight version {wanted} was sampled by {min(other)}: somebody else "
            "changes the weights of this vLLM server."
        )


_AT_ONCE = 32
"""How many tokens are asked for at the same time."""

_Generate = Callable[[Mapping[str, Any]], Awaitable[WireAnswer]]
"""Asks the server and adapter that sampled; the body has `token_ids` and `sampling_params`."""


async def _with_plain_logprobs(
    generate: _Generate, prompt_ids: Int32Array, chunk: Chunk, params: SamplingParams
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


async def _as_a_prompt(generate: _Generate, whole: list[int], count: int, top: int) -> list[dict[int, float]]:
    """For each of the last `count` tokens its log-prob and those of the `top` most probable ones, at temperature 1."""
    scoring = {"max_tokens": 1, "prompt_logprobs": top, "detokenize": False}
    answer = await generate({"token_ids": whole, "sampling_params": scoring})
    rows = (answer.prompt_logprobs or [])[-count:]
    if len(rows) != count:
        raise EngineError("vLLM gave no log-probs of a prompt's tokens.")
    return [{int(token): scored.logprob for token, scored in (row or {}).items()} for row in rows]


async def _at_temperature(
    generate: _Generate, whole: list[int], rows: list[dict[int, float]], temperature: float
) -> list[dict[int, float]]:
    """The rows at another temperature."""
    # Two log-probs are the sampled token's and the most probable one's.
    slots = asyncio.Semaphore(_AT_ONCE)
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
