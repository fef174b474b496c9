"""Weights that did not arrive stop the run at its first step, however they went astray; those that did are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.backend import POLICY, ModelSpec
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.errors import EngineError
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.metrics import read_metrics

from ...engine.conftest import random_ids
from ...engine.test_model_process import row
from ..test_backend import fit
from .on_fake import (
    FlipsABit,
    HangsUp,
    IgnoresAdapters,
    KeepsContexts,
    KeepsOldHead,
    KeepsOldWeights,
    LabelsOld,
    LoraOnFake,
    VLLMOnFake,
)

PROMPT = random_ids(12, 1)

STEP = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "learning_rate": 1e-2, "max_context": 128, "max_kl": None}


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4])
def test_every_step_samples_from_what_was_learned(tmp_path: Path, lora_rank: int | None) -> None:
    rows = fit(tmp_path, VLLMOnFake, lora_rank=lora_rank, **STEP)
    assert len(rows) == 2
    assert all(m["sync_gap"] < 1e-4 for m in rows if m["updates"])
    assert any(m["updates"] for m in rows)
    assert all(m["logprob_gap_max"] < 1e-4 for m in rows if m["updates"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "settings", "cause"),
    [
        (KeepsOldWeights, {}, "off the learner's"),
        (KeepsOldHead, {}, "off the learner's"),
        (KeepsContexts, {}, "off the learner's"),
        (LabelsOld, {}, "still samples from version 0"),
        (IgnoresAdapters, {"lora_rank": 4}, "off the learner's"),
    ],
)
def test_weights_that_go_astray_stop_the_run_at_its_first_step(
    tmp_path: Path, server: Any, settings: dict[str, Any], cause: str
) -> None:
    class Sabotaged(VLLMOnFake):
        fake = server

    with pytest.raises(EngineError, match=cause):
        fit(tmp_path, Sabotaged, **STEP, **settings)
    assert [m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == []


@pytest.mark.slow
async def test_a_server_that_began_again_is_not_asked_for_adapters_it_never_had(tiny_model_dir: Path) -> None:
    backend = LoraOnFake(ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=64, seed=0))
    await backend.start()
    try:
        await learn(backend)
        await learn(backend)
        (before, current) = backend.server.adapters
        backend.server.adapters.clear()
        assert (await sample(backend)).version == 2
        assert list(backend.server.adapters) == [current]
        assert await learn(backend) == 3, "the one before is taken from those servers that have it"
        assert before not in backend.server.adapters
        assert (await sample(backend)).version == 3
    finally:
        await backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4])
async def test_a_flipped_bit_is_found_before_it_is_sampled_from(tiny_model_dir: Path, lora_rank: int | None) -> None:
    backend = VLLMOnFake(
        ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=64, seed=0, lora_rank=lora_rank)
    )
    await backend.start()
    try:
        await learn(backend)
        backend.server.__class__ = FlipsABit
        last = "norm.weight" if lora_rank is None else "lora_"
        with pytest.raises(EngineError, match=rf"damaged on their way to the vLLM server at http.*: \S*{last}"):
            await learn(backend)
        assert backend.server.version in ("1", "default"), "it was told of no other weights"
    finally:
        await backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("lora_rank", [None, 4])
async def test_a_connection_that_is_lost_while_publishing_costs_another_try(
    tiny_model_dir: Path, lora_rank: int | None
) -> None:
    class OnIt(VLLMOnFake):
        fake = HangsUp

    backend = OnIt(ModelSpec(model=str(tiny_model_dir), device="cpu", max_context=64, seed=0, lora_rank=lora_rank))
    await backend.start()
    try:
        assert isinstance(backend.server, HangsUp)
        backend.server.soon = True
        assert await learn(backend) == 1
        assert (await sample(backend)).version == 1
        assert not backend.server.soon
    finally:
        await backend.close()


async def sample(backend: VLLMOnFake) -> Chunk:
    params = SamplingParams(max_tokens=6, seed=3)
    return concat([chunk async for chunk in backend.engine(POLICY).generate(PROMPT, params)])


async def learn(backend: VLLMOnFake) -> int:
    learner = backend.learner(POLICY)
    await learner.forward_backward([row(PROMPT, await sample(backend))], LossConfig(name="reinforce"))
    await learner.optim_step(OptimParams(learning_rate=3e-3))
    return await backend.publish(POLICY)
