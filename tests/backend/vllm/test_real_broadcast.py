"""Two real vLLM servers for CPUs are sent all weights over gloo: exact, whatever is killed or damaged on the way."""
# ruff: noqa: ASYNC110 - small files, and waits of a test

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio

from agentlightning.backend import POLICY, ModelSpec
from agentlightning.backend.vllm.api import Sums
from agentlightning.backend.vllm.backend import VLLMBackend
from agentlightning.backend.vllm.broadcast import Broadcast
from agentlightning.backend.vllm.process import ServerProcess
from agentlightning.backend.vllm.replica import Replica
from agentlightning.backend.vllm.worker.agl_vllm_worker import sums_of
from agentlightning.engine.base import Chunk, SamplingParams, concat
from agentlightning.errors import EngineError
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.models import resolve_model

from ...engine.test_model_process import row
from .test_real import EXACT, PROGRAM, PROMPT

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1500),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(PROGRAM is None, reason="the real vLLM is tested by `make test-vllm`"),
]
TENSOR = "model.layers.0.mlp.down_proj.weight"


class Sabotaged(Broadcast):
    """What the learner wrote can be changed, before its checksums are made or afterwards."""

    before: Callable[[Path], None] | None = None
    after: Callable[[Path], None] | None = None

    async def put(self, policy: str, name: str) -> Sums:
        sums = await super().put(policy, name)
        if self.before is not None:
            self.before(self._folder / name)
            sums = sums_of(str(self._folder / name))
        if self.after is not None:
            self.after(self._folder / name)
        return sums


class OnSabotaged(VLLMBackend):
    def _exchange(self, folder: Path, served: Any) -> Sabotaged:
        made = super()._exchange(folder, served)
        assert isinstance(made, Broadcast)
        made.__class__ = Sabotaged
        assert isinstance(made, Sabotaged)
        self.exchange = made
        return made


def change(folder: Path, tensors: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    save_file(tensors(load_file(file)), file, metadata={"format": "pt"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OnSabotaged]:
    options = {
        "command": PROGRAM,
        "replicas": 2,
        "weight_transfer": "gloo",
        "args": ["--enforce-eager"],
        "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    }
    folder = str(tmp_path_factory.mktemp("vllm"))
    spec = ModelSpec(model="calc", device="cpu", max_context=512, seed=0, folder=folder)
    made = OnSabotaged(replace(spec, backend_options=options))
    await made.start()
    yield made
    await made.close()


async def sample(backend: OnSabotaged, replica: Replica) -> Chunk:
    params = SamplingParams(max_tokens=8, seed=3)
    sampled = backend.engine(POLICY)._sample(replica, PROMPT, params, False)  # pyright: ignore[reportPrivateUsage]
    return concat([chunk async for chunk in sampled])


async def gap(backend: OnSabotaged, chunk: Chunk) -> float:
    """Between the learner's log-probs and the server's."""
    batch = msgspec.structs.replace(row(PROMPT, chunk), temperature_E=np.ones(len(chunk.ids), dtype=np.float32))
    return float(np.abs(await backend.learner(POLICY).forward(batch) - chunk.plain_logprobs).max())


async def learn(backend: OnSabotaged) -> int:
    """From tokens that mean nothing, so that it moves each time."""
    learner, chunk = backend.learner(POLICY), await sample(backend, (await both(backend))[0])
    random = np.random.default_rng((await learner.info()).version)
    chunk = msgspec.structs.replace(chunk, ids=random.integers(20, 200, len(chunk.ids), dtype=np.int32))
    await learner.forward_backward([row(PROMPT, chunk)], LossConfig(name="reinforce"))
    await learner.optim_step(OptimParams(learning_rate=1e-3))
    return await backend.publish(POLICY)


async def both(backend: OnSabotaged) -> list[Replica]:
    """The servers, once both are ready."""
    while len(backend.servers.fleet.ready) < 2:
        await asyncio.sleep(0.1)
    return list(backend.servers.fleet.replicas)


async def check(backend: OnSabotaged, version: int) -> None:
    """Both servers sample from the learner's weights."""
    for replica in await both(backend):
        chunk = await sample(backend, replica)
        assert chunk.version == version
        assert await gap(backend, chunk) < EXACT


async def test_both_servers_sample_from_what_was_sent(backend: OnSabotaged) -> None:
    for _ in range(3):
        before = await sample(backend, (await both(backend))[1])
        version = await learn(backend)
        assert await gap(backend, before) > 10 * EXACT, "the learner moved"
        await check(backend, version)
        assert not list(backend.exchange._folder.glob("vllm-server-*/*")), "what was loaded is removed"


async def test_a_server_that_is_killed_while_it_is_sent_weights_holds_nobody_up(
    backend: OnSabotaged, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stopped, so that the group waits for it, and then killed."""
    victim = (await both(backend))[1]
    process = victim.process
    assert isinstance(process, ServerProcess)
    publishing = asyncio.create_task(learn(backend))
    while not list(backend.exchange._folder.glob("policy-v*")):
        await asyncio.sleep(0)
    os.killpg(process.pid, signal.SIGSTOP)
    await asyncio.sleep(3)
    assert not publishing.done(), "the group waits"
    process.kill()
    version = await asyncio.wait_for(publishing, 300)
    assert "did not end within" not in caplog.text, "it was seen that it is gone"
    chunk = await sample(backend, backend.servers.fleet.replicas[0])
    assert chunk.version == version
    assert await gap(backend, chunk) < EXACT
    await check(backend, version)
    assert victim.process is not process
    await check(backend, await learn(backend))


async def test_an_old_tensor_is_seen_in_what_is_sampled(backend: OnSabotaged) -> None:
    """Where it was old when its checksum was made."""
    from safetensors.torch import load_file

    old = load_file(Path(resolve_model("calc")) / "model.safetensors")
    backend.exchange.before = lambda folder: change(folder, lambda now: {**now, TENSOR: old[TENSOR]})
    try:
        await learn(backend)
    finally:
        backend.exchange.before = None
    for replica in await both(backend):
        assert await gap(backend, await sample(backend, replica)) > EXACT
    await check(backend, await learn(backend))


async def test_a_tensor_that_is_left_out_is_named(backend: OnSabotaged) -> None:
    """Nothing is loaded then. vLLM by itself would go on with the old one."""
    version = backend.servers.engine(POLICY).version
    backend.exchange.after = lambda folder: change(folder, lambda now: {n: t for n, t in now.items() if n != TENSOR})
    try:
        with pytest.raises(EngineError, match=rf"damaged on their way .*{TENSOR}"):
            await learn(backend)
    finally:
        backend.exchange.after = None
    chunk = await sample(backend, backend.servers.fleet.replicas[0])
    assert chunk.version == version
