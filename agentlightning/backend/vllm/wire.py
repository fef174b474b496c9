"""Requests and answers of vLLM's token endpoint (`/inference/v1/generate`) as JSON. Pure.

Shape letters: T sampled tokens, K alternatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from agentlightning.engine.base import Chunk, PromptLogprobs, SamplingParams
from agentlightning.errors import EngineError
from agentlightning.types.call import Float32Array, Int32Array


class Alternative(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float


class WireSampled(msgspec.Struct, frozen=True):
    token_id: int
    logprob: float
    top_logprobs: list[Alternative] = []
    """The sampled token first, then the most probable ones; as many in all as were asked for."""


class Logprobs(msgspec.Struct, frozen=True):
    content: list[WireSampled] | None = None


class WireSpan(msgspec.Struct, frozen=True):
    """The weight version of a run of sampled tokens."""

    version: str
    start: int
    end: int


class WireChoice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[WireSpan] | None = None
    """Of an answer in parts only the last one has them, and they cover all."""
    logprobs: Logprobs | None = None


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = 0


class WireUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class WireScored(msgspec.Struct, frozen=True):
    logprob: float


class WireAnswer(msgspec.Struct, frozen=True):
    """A whole answer, or one part of it."""

    choices: list[WireChoice]
    usage: WireUsage | None = None
    prompt_logprobs: list[dict[str, WireScored] | None] | None = None
    """For each token of the prompt its log-prob and those of the most probable ones, by id."""

    @property
    def cached_tokens(self) -> int:
        details = self.usage.prompt_tokens_details if self.usage is not None else None
        return (details.cached_tokens or 0) if details is not None else 0


read_answer = msgspec.json.Decoder(WireAnswer).decode


def sampling(params: SamplingParams, *, most_tokens: int, eos_ids: Sequence[int], seed: int | None) -> dict[str, Any]:
    """What vLLM is asked for. `most_tokens` is how many tokens fit behind the prompt."""
    most = most_tokens if params.max_tokens is None else min(params.max_tokens, most_tokens)
    found: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "max_tokens": most,
        "min_tokens": min(params.min_tokens, most),
        "ignore_eos": params.ignore_eos,
        "stop_token_ids": sorted({*(() if params.ignore_eos else eos_ids), *params.stop_token_ids}),
        "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,  # the sampled token counts as one
        "detokenize": bool(params.stop),
        "skip_special_tokens": False,  # special tokens count as text
    }
    if params.shifts_logits:
        found["presence_penalty"], found["frequency_penalty"] = params.presence_penalty, params.frequency_penalty
        found["logit_bias"] = params.logit_bias
    if params.stop:
        found["stop"] = list(params.stop)
    if seed is not None:
        found["seed"] = seed
    if params.prompt_logprobs is not None:
        found["prompt_logprobs"] = params.prompt_logprobs
    if params.grammar is not None:
        found["structured_outputs"] = {"grammar": params.grammar}
    return found


def restricts(params: SamplingParams) -> bool:
    """Whether tokens are left out or their logits moved before one is drawn, so that its log-prob is not that of the
    plain softmax."""
    cut = params.temperature > 0 and (params.top_p < 1 or params.top_k > 0 or params.min_p > 0)
    return cut or params.shifts_logits or params.grammar is not None


def chunk_of(choice: WireChoice, params: SamplingParams, *, version: int, cached_tokens: int = 0) -> Chunk:
    """The tokens of an answer or a part of one. Their plain log-probs are right unless the settings `restricts`.

    A greedy token's log-prob under its own distribution is 0: nothing else could have been drawn.
    """
    ids_T = np.array(choice.token_ids or [], dtype=np.int32)
    content = (choice.logprobs.content if choice.logprobs is not None else None) or []
    if [s.token_id for s in content] != ids_T.tolist():
        raise EngineError(f"vLLM gave {len(content)} log-probs for {len(ids_T)} tokens, or those of other tokens.")
    plain_T = np.array([s.logprob for s in content], dtype=np.float32)
    stopped = choice.finish_reason == "stop" and isinstance(choice.stop_reason, str)
    top_ids, top_logprobs = _alternatives(content, params.top_logprobs)
    return Chunk(
        ids=ids_T,
        logprobs=np.zeros_like(plain_T) if params.temperature == 0 else plain_T,
        plain_logprobs=plain_T,
        version=version,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finish_reason=choice.finish_reason,
        stop_string=str(choice.stop_reason) if stopped else None,
        cached_tokens=cached_tokens,
    )


def _alternatives(content: Sequence[WireSampled], count: int) -> tuple[Int32Array | None, Float32Array | None]:
    if not count:
        return None, None
    rows = [sorted({(-a.logprob, a.token_id) for a in s.top_logprobs})[:count] for s in content]
    ids_TK = np.array([[i for _, i in row] for row in rows], dtype=np.int32).reshape(len(rows), count)
    logprobs_TK = np.array([[-p for p, _ in row] for row in rows], dtype=np.float32).reshape(len(rows), count)
    return ids_TK, logprobs_TK


def prompt_of(answer: WireAnswer, prompt_ids: Int32Array, count: int) -> PromptLogprobs | None:
    """What an answer tells of its prompt, whose first token has nothing before it, with so many alternatives."""
    rows = [{int(token): found.logprob for token, found in (row or {}).items()} for row in answer.prompt_logprobs or ()]
    wanted = prompt_ids.tolist()
    if len(rows) != len(wanted) or any(token not in row for row, token in zip(rows[1:], wanted[1:], strict=True)):
        raise EngineError("vLLM gave no log-probs of a prompt's tokens.")
    if len(wanted) == 1:
        return None
    logprobs = np.array([row[token] for row, token in zip(rows[1:], wanted[1:], strict=True)], dtype=np.float32)
    if not count:
        return PromptLogprobs(logprobs=logprobs)
    ranked = [sorted(row.items(), key=lambda item: (-item[1], item[0]))[:count] for row in rows[1:]]
    return PromptLogprobs(
        logprobs=logprobs,
        top_ids=np.array([[token for token, _ in row] for row in ranked], dtype=np.int32),
        top_logprobs=np.array([[value for _, value in row] for row in ranked], dtype=np.float32),
    )


def versions_of(choice: WireChoice) -> list[tuple[int, int, int]]:
    """(version, start, end) of each run of tokens under one weight version, in order. Raises EngineError where the
    server says nothing of its versions, or holds weights that nobody here published."""
    found = []
    for span in choice.weight_versions or []:
        if not span.version.isdecimal():
            raise EngineError(
                f"A vLLM server samples from weights that it calls '{span.version}'; they were not published by this "
                "run. Was it started again by somebody else?"
            )
        found.append((int(span.version), span.start, span.end))
    if not found:
        raise EngineError("vLLM does not say which weight version it sampled from; version 0.32 or newer does.")
    return found


def split(chunk: Chunk, versions: Sequence[tuple[int, int, int]]) -> list[Chunk]:
    """One chunk per weight version; only the last has the finish reason."""
    last = len(versions) - 1
    parts = []
    for place, (version, start, end) in enumerate(versions):
        piece = slice(start, len(chunk.ids) if place == last else end)
        parts.append(
            msgspec.structs.replace(
                chunk,
                ids=chunk.ids[piece],
                logprobs=chunk.logprobs[piece],
                plain_logprobs=chunk.plain_logprobs[piece],
                top_ids=None if chunk.top_ids is None else chunk.top_ids[piece],
                top_logprobs=None if chunk.top_logprobs is None else chunk.top_logprobs[piece],
                version=version,
                finish_reason=chunk.finish_reason if place == last else None,
                stop_string=chunk.stop_string if place == last else None,
            )
        )
    return parts
