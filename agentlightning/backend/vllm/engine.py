"""A policy's `Engine`: token ids to a vLLM server and back, with log-probs, weight versions and a second try."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from agentlightning.backend.counters import Counters
from agentlightning.backend.fleet import Fleet
from agentlightning.backend.seeds import Seeds
from agentlightning.backend.vllm.api import ReplicaLost
from agentlightning.backend.vllm.gate import Gate
from agentlightning.backend.vllm.plain import with_plain_logprobs
from agentlightning.backend.vllm.publication import RequestTarget, ServerPublication
from agentlightning.backend.vllm.replica import Replica
from agentlightning.backend.vllm.wire import WireAnswer, chunk_of, prompt_of, restricts, sampling, split, versions_of
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
            chunk = await with_plain_logprobs(
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
