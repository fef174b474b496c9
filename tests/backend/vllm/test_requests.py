"""What is asked of vLLM and what becomes of its answers, on a server of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from agentlightning.backend import POLICY, ModelSpec, check_backend
from agentlightning.backend.vllm.backend import served_by
from agentlightning.backend.vllm.options import VLLMOptions, parse_options
from agentlightning.backend.vllm.process import ServerContent, arguments
from agentlightning.backend.vllm.publication import Gate
from agentlightning.backend.vllm.wire import WireChoice, WireSpan, restricts, sampling, split, versions_of
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.errors import ConfigError, EngineError, ModelError
from agentlightning.models.shape import read_shape

from ...engine.conftest import random_ids
from ...engine.test_model_process import of_prompt, row
from .on_fake import VLLMOnFake

PROMPT = random_ids(12, 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tiny_model_dir: Path) -> AsyncIterator[VLLMOnFake]:
    made = VLLMOnFake(ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=64, seed=0))
    await made.start()
    yield made
    await made.close()


async def sample(backend: VLLMOnFake, *, stream: bool = False, **settings: Any) -> Chunk:
    params = SamplingParams(**{"max_tokens": 6, "seed": 3, **settings})
    return concat([chunk async for chunk in backend.engine(POLICY).generate(PROMPT, params, stream=stream)])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({}, False),
        ({"temperature": 0.7}, False),
        ({"temperature": 0.0}, False),
        ({"stream": True}, False),
        ({"top_k": 5}, True),
        ({"top_k": 5, "stream": True}, True),
        ({"top_k": 5, "temperature": 0.6}, True),
    ],
)
async def test_plain_logprobs_are_the_learners(backend: VLLMOnFake, settings: dict[str, Any], cut: bool) -> None:
    chunk = await sample(backend, **settings)
    temperature = np.full(len(chunk.ids), settings.get("temperature") or 1.0, dtype=np.float32)
    batch = msgspec.structs.replace(row(PROMPT, chunk), temperature_E=temperature)
    np.testing.assert_allclose(await backend.learner(POLICY).forward(batch), chunk.plain_logprobs, atol=1e-4)
    assert chunk.finish_reason is not None
    if cut:
        assert (chunk.logprobs > chunk.plain_logprobs).any()
    elif settings.get("temperature") != 0:
        np.testing.assert_array_equal(chunk.logprobs, chunk.plain_logprobs)
    else:
        np.testing.assert_array_equal(chunk.logprobs, 0)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_k": 3, "temperature": 0.5}])
async def test_alternatives_are_of_the_plain_distribution(backend: VLLMOnFake, settings: dict[str, Any]) -> None:
    chunk = await sample(backend, top_logprobs=4, **settings)
    assert chunk.top_ids is not None
    assert chunk.top_logprobs is not None
    assert chunk.top_ids.shape == chunk.top_logprobs.shape == (len(chunk.ids), 4)
    assert (np.diff(chunk.top_logprobs) <= 0).all()
    assert (np.exp(chunk.top_logprobs.astype(float)).sum(-1) < 1 + 1e-4).all()
    for ids, row_, token, logprob in zip(
        chunk.top_ids, chunk.top_logprobs, chunk.ids, chunk.plain_logprobs, strict=True
    ):
        if token in ids:
            np.testing.assert_allclose(row_[ids.tolist().index(token)], logprob, atol=1e-5)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("settings", [{}, {"stream": True}, {"top_k": 5, "temperature": 0.6}])
async def test_log_probs_of_a_prompt_are_the_learners(backend: VLLMOnFake, settings: dict[str, Any]) -> None:
    for top in (0, 2):
        chunk = await sample(backend, prompt_logprobs=top, **settings)
        assert chunk.prompt is not None
        found = await backend.learner(POLICY).forward(of_prompt(PROMPT, chunk))
        np.testing.assert_allclose(found, chunk.prompt.logprobs, atol=1e-4)
        if top:
            assert chunk.prompt.top_logprobs is not None
            assert chunk.prompt.top_logprobs.shape == (len(PROMPT) - 1, top)
            assert (chunk.prompt.top_logprobs[:, 0] >= chunk.prompt.logprobs - 1e-6).all()
    assert (await backend.engine(POLICY).info()).scores_prompts


@pytest.mark.asyncio(loop_scope="module")
async def test_the_same_seed_gives_the_same_and_a_reseeded_backend_begins_again(backend: VLLMOnFake) -> None:
    first, second = await sample(backend), await sample(backend)
    np.testing.assert_array_equal(first.ids, second.ids)
    drawn: list[list[int]] = []
    for _ in range(2):
        await backend.reseed(7)
        drawn.append([i for _ in range(3) for i in (await sample(backend, seed=None)).ids.tolist()])
    assert drawn[0] == drawn[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_that_cannot_be_are_refused(backend: VLLMOnFake) -> None:
    with pytest.raises(ConfigError, match="temperature must be 0 or more"):
        await sample(backend, temperature=-1.0)
    with pytest.raises(ModelError, match="outside the model's vocabulary"):
        async for _ in backend.engine(POLICY).generate(np.array([9999], dtype=np.int32), SamplingParams()):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_that_is_closed_lets_weights_change(backend: VLLMOnFake) -> None:
    params = SamplingParams(max_tokens=40, seed=1)
    async with aclosing(backend.engine(POLICY).generate(PROMPT, params, stream=True)) as stream:
        async for _ in stream:
            break
    async with asyncio.timeout(60), backend.servers.gate.closed():
        pass


# ---- parts, without a server ---------------------------------------------------------------------------------------


async def test_a_closed_gate_waits_for_those_who_must_finish_and_for_no_others() -> None:
    gate, order = Gate(), list[str]()
    leave = asyncio.Event()

    async def inside(name: str, *, must_finish: bool) -> None:
        async with gate.inside(must_finish=must_finish):
            order.append(f"{name} in")
            await leave.wait()
            order.append(f"{name} out")

    async def change() -> None:
        async with gate.closed():
            order.append("changed")

    held = asyncio.create_task(inside("held", must_finish=False))
    await asyncio.sleep(0)
    await change()
    first = asyncio.create_task(inside("first", must_finish=True))
    for _ in range(20):
        await asyncio.sleep(0)
    changing = asyncio.create_task(change())
    late = asyncio.create_task(inside("late", must_finish=True))
    for _ in range(20):
        await asyncio.sleep(0)
    assert order == ["held in", "changed", "first in"]
    leave.set()
    await asyncio.gather(held, first, changing, late)
    assert order.index("first out") < len(order) - 1 - order[::-1].index("changed") < order.index("late in")


def test_a_response_of_two_versions_is_two_chunks() -> None:
    values = np.arange(5, dtype=np.float32)
    chunk = Chunk(ids=values.astype(np.int32), logprobs=values, plain_logprobs=values, version=8, finish_reason="stop")
    spans = versions_of(WireChoice(weight_versions=[WireSpan("7", 0, 2), WireSpan("8", 2, 5)]))
    first, second = split(chunk, spans)
    assert (first.version, first.ids.tolist(), first.finish_reason) == (7, [0, 1], None)
    assert (second.version, second.ids.tolist(), second.finish_reason) == (8, [2, 3, 4], "stop")


def test_weights_that_nobody_published_are_refused() -> None:
    with pytest.raises(EngineError, match="calls 'default'"):
        versions_of(WireChoice(weight_versions=[WireSpan("default", 0, 2)]))
    with pytest.raises(EngineError, match="does not say"):
        versions_of(WireChoice())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replica": 2}, "replica(.|\n)*There are: .*replicas, urls"),
        ({"replicas": "two"}, "Expected `int`"),
        ({"replicas": 0}, "replicas must be 1 or more"),
        ({"devices": ["0"], "replicas": 2}, "devices must name as many"),
        ({"urls": ["localhost:8000"]}, "must begin with http"),
        ({"urls": ["http://localhost:8000"], "replicas": 2}, "replicas would have no effect"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_backend("vllm", options)


def test_options_of_a_backend_without_any_are_refused() -> None:
    with pytest.raises(ConfigError, match="the backend 'embedded' has none"):
        check_backend("embedded", {"replicas": 2})


OF_OTHERS = {"top_logprobs", "grammar", "owner", "stop", "stop_token_ids", "seed", "max_tokens", "keeps"}
"""Named otherwise in the body, always there, or of the embedded engine alone."""


@pytest.mark.parametrize("name", [f for f in SamplingParams.__struct_fields__ if f not in OF_OTHERS])
def test_no_setting_is_dropped_on_the_way(name: str) -> None:
    given = {"logit_bias": {5: 2.0}, "top_k": 3, "min_tokens": 4, "ignore_eos": True}.get(name, 0.5)
    params = SamplingParams(**{name: given})
    body = sampling(params, most_tokens=9, eos_ids=[7], seed=None)
    assert body[name] == given
    assert restricts(params) == (name not in ("temperature", "ignore_eos", "prompt_logprobs"))
    assert body["stop_token_ids"] == ([] if name == "ignore_eos" else [7])


def test_the_users_arguments_come_last() -> None:
    served = ServerContent(
        model="m", dtype="bfloat16", on_cpu=True, max_context=512, max_concurrency=8, lora_rank=9, adapters=2
    )
    line = arguments("vllm", served, parse_options({"args": ["--max-num-seqs", "4"]}), "h", 80)
    assert line[-2:] == ["--max-num-seqs", "4"]
    assert line[line.index("--max-lora-rank") + 1] == "16", "the next size that vLLM knows"
    assert line[line.index("--max-loras") + 1] == "4"


def test_servers_on_a_cpu_do_not_take_the_whole_memory_for_contexts(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=128, max_concurrency=4)
    shape = read_shape(tiny_model_dir)
    assert shape is not None
    wanted = served_by(spec, 2).contexts_bytes
    assert wanted is not None
    assert wanted == 2 * 128 * 4 * shape.kv_numbers * 4
    monkeypatch.setattr("agentlightning.backend.vllm.backend.memory_of", lambda device: (wanted, "this machine"))
    assert served_by(spec, 2).contexts_bytes == int(0.3 * wanted)
    line = arguments("vllm", served_by(spec), parse_options({}), "h", 80)
    assert "--kv-cache-memory-bytes" in line
    line = arguments("vllm", replace(served_by(spec), on_cpu=False), parse_options({}), "h", 80)
    assert "--kv-cache-memory-bytes" not in line


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    for name, default in msgspec.structs.asdict(VLLMOptions()).items():
        assert f"| `{name}` | `{default!r}` |" in text, name


async def test_without_vllm_the_message_says_how_to_get_it(tiny_model_dir: Path) -> None:
    from agentlightning.backend import make_backend

    options = {"command": "/nowhere/vllm"}
    backend = make_backend("vllm", ModelSpec(model=str(tiny_model_dir), device="cpu", backend_options=options))
    with pytest.raises(ConfigError, match="no program '/nowhere/vllm'"):
        await backend.start()
    await backend.close()
