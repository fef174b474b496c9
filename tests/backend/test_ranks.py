"""A learner over several ranks, in real processes: the numbers of one rank, its files, and the end of a rank."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.embedded.backend import EmbeddedBackend, check_cores, settings_of
from agentlightning.backend.embedded.client import ModelProcess
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.backend.vllm.backend import VLLMBackend
from agentlightning.errors import BackendDied, ConfigError
from agentlightning.learner.base import LossConfig, OptimParams, PackedBatch
from agentlightning.learner.packing import CreditedCall, pack
from tests.learner.conftest import group_of_conversations, make_call

__all__ = ["group_of_conversations", "make_call"]

STEP = OptimParams(learning_rate=1e-3, max_kl=0.05)


def settings(ranks: int, shared: int = 1) -> ProcessSettings:
    model = ProcessSettings(model="calc", device="cpu", max_concurrency=2, max_context=64, seed=1)
    return msgspec.structs.replace(model, ranks=ranks, tensor_parallel=shared)


async def learned(process: ModelProcess, batch: PackedBatch) -> list[float]:
    """A step, and what it says in numbers."""
    passed = await process.forward_backward([batch], LossConfig())
    step = await process.optim_step(STEP)
    await process.publish()
    return [passed.loss, step.grad_norm, float((await process.forward(batch)).mean())]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [1, 2])
def test_the_engine_samples_from_what_ranks_learned(
    shared: int, tmp_path: Path, group_of_conversations: list[CreditedCall]
) -> None:
    """Two ranks learn, the whole model has it and is exported; one process goes on from it with the same numbers."""
    batch = pack(group_of_conversations)

    async def run() -> tuple[float, float]:
        async with ModelProcess(settings(2, shared)) as process:
            before = float((await process.forward(batch)).mean())
            *_, after = await learned(process, batch)
            await process.export(str(tmp_path / "model"))
            await process.save_state(str(tmp_path / "state"))
        assert after != pytest.approx(before, rel=1e-4)
        alone = msgspec.structs.replace(settings(1), model=str(tmp_path / "model"))
        async with ModelProcess(alone) as process:
            await process.load_state(str(tmp_path / "state"))
            await process.publish()
            return after, float((await process.forward(batch)).mean())

    two, one = asyncio.run(run())
    assert one == pytest.approx(two, rel=1e-5)


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named(group_of_conversations: list[CreditedCall]) -> None:
    async def run() -> str:
        async with ModelProcess(settings(2)) as process:
            assert process.pid is not None
            rank = psutil.Process(process.pid).children()[0]
            working = asyncio.ensure_future(learned(process, pack(group_of_conversations)))
            await asyncio.sleep(0.2)
            os.kill(rank.pid, signal.SIGKILL)
            with pytest.raises(BackendDied) as died:
                await asyncio.wait_for(process.watch(), 30)
            with pytest.raises(BackendDied):
                await working
            return f"{rank.pid}: {died.value}"

    words = asyncio.run(run())
    assert f"Learner rank 1 (process {words.split(':')[0]}) ended by signal SIGKILL" in words
    assert "last checkpoint" in words


@pytest.mark.parametrize("backend", [EmbeddedBackend, VLLMBackend])
def test_more_ranks_than_a_machine_can_run_are_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with pytest.raises(ConfigError, match="ranks=64 processes would share the 2 cores"):
        backend(ModelSpec(model="calc", ranks=64))
    check_cores(8)  # as many GPUs as a machine has, whatever its cores


def test_what_cannot_be_spread_is_refused() -> None:
    for spec in (ModelSpec(model="calc", ranks=2, policies=["a", "b"]), ModelSpec(model="calc", ranks=2, critic=True)):
        with pytest.raises(ConfigError, match="ranks=2 spreads one policy"):
            settings_of(spec)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2 .* let ranks \(3\) be a multiple"):
        settings_of(ModelSpec(model="calc", ranks=3, tensor_parallel=2))
