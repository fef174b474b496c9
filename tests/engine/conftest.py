"""A tiny real policy, and the plain forward that the engine is compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.engine.events import Ended, Event, Failed, PartialSample, Request
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.learner.policy import LoraSpec, Policy, load_policy
from agentlightning.types.call import Float32Array, Int32Array


@pytest.fixture
def policy(tiny_model_dir: Path) -> Policy:
    torch.set_num_threads(1)
    return load_policy(tiny_model_dir, device="cpu")


@pytest.fixture
def lora_policy(tiny_model_dir: Path) -> Policy:
    """An adapter whose matrices are random, so that it matters whether it is applied."""
    torch.set_num_threads(1)
    policy = load_policy(tiny_model_dir, device="cpu", lora=LoraSpec(rank=4, alpha=8))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.trainable():
            parameter.normal_(std=0.1)
    return policy


def make_engine(policy: Policy, **settings: Any) -> TorchEngine:
    return TorchEngine(policy.model, policy.tokenizer, policy.eos_ids, **{"seed": 0, **settings})


def random_ids(count: int, seed: int) -> Int32Array:
    """Ordinary tokens: no special ones among them."""
    return np.random.default_rng(seed).integers(0, 291, count).astype(np.int32)


def reference(policy: Policy, prompt: Int32Array, response: Int32Array, temperature: float = 1.0) -> Float32Array:
    """Plain log-probs of a response from one ordinary forward of the model over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None].to(policy.device)
    with torch.no_grad():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    targets = torch.from_numpy(response.astype(np.int64)).to(policy.device)
    return logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()


def gap(policy: Policy, request: Request, chunk: Chunk) -> float:
    """Largest difference between the engine's plain log-probs of a response and those of an ordinary forward."""
    expected = reference(policy, request.prompt_ids, chunk.ids, request.params.temperature)
    return float(np.abs(expected - chunk.plain_logprobs).max())


def run(engine: TorchEngine, requests: list[Request]) -> dict[int, Chunk]:
    """Submit requests and step until they are done."""
    for request in requests:
        engine.submit(request)
    return drain(engine)


def drain(engine: TorchEngine, after_step: Callable[[list[Event]], None] | None = None) -> dict[int, Chunk]:
    """Step until nothing is active; the responses of all requests, streamed parts put together."""
    parts: dict[int, list[Chunk]] = {}
    while engine.active:
        events = engine.step()
        collect(events, parts)
        if after_step is not None:
            after_step(events)
    return {request_id: concat(chunks) for request_id, chunks in parts.items()}


def collect(events: list[Event], parts: dict[int, list[Chunk]]) -> None:
    for event in events:
        assert not isinstance(event, Failed), event
        if isinstance(event, PartialSample | Ended):
            parts.setdefault(event.request_id, []).append(event.chunk)
            continue
        for row, request_id in enumerate(event.request_ids):
            one = slice(row, row + 1)
            chunk = Chunk(
                ids=event.ids[one],
                logprobs=event.logprobs[one],
                plain_logprobs=event.plain_logprobs[one],
                version=event.version,
                top_ids=None if event.top_ids is None else event.top_ids[one],
                top_logprobs=None if event.top_logprobs is None else event.top_logprobs[one],
            )
            parts.setdefault(request_id, []).append(chunk)


def request(request_id: int, prompt: Int32Array, *, stream: bool = False, **params: object) -> Request:
    settings = SamplingParams(**{"max_tokens": 16, **params})  # pyright: ignore[reportArgumentType]
    return Request(request_id=request_id, prompt_ids=prompt, params=settings, stream=stream)
