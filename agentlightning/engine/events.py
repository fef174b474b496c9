"""What goes into the embedded engine and what comes out of its steps: plain data, sent over the socket as it is."""

from __future__ import annotations

import msgspec

from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.types.call import Float32Array, Int32Array

POLICY = "policy"
"""The name of a policy that is alone."""


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One response to sample. `request_id` is the caller's, unique among the requests that are not done."""

    request_id: int
    prompt_ids: Int32Array
    params: SamplingParams
    stream: bool = False
    """Give out every token as it is sampled."""
    policy: str = POLICY
    """Which one samples, where the model process holds several."""


class SampledTokens(msgspec.Struct, frozen=True, kw_only=True, tag="sampled"):
    """One more token for each of B streaming requests: arrays have shape [B], `top_*` [B, K]."""

    request_ids: list[int]
    ids: Int32Array
    logprobs: Float32Array
    plain_logprobs: Float32Array
    version: int
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None
    kept: Int32Array | None = None
    """Of the one request, where it asked for it."""


class PartialSample(msgspec.Struct, frozen=True, kw_only=True, tag="part"):
    """What a request sampled under weights that have just changed; it goes on."""

    request_id: int
    chunk: Chunk


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A request is done. `chunk` holds its tokens (of a stream: those not given out yet) and the finish reason."""

    request_id: int
    chunk: Chunk


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """A request cannot be finished; `message` says why, `error` names a class of `agentlightning.errors`."""

    request_id: int
    message: str
    error: str = "EngineError"


Event = SampledTokens | PartialSample | Ended | Failed
