"""A backend without a model: its learner counts steps, its engine says what the learner says."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.learner.base import OptimParams, PackedBatch, PassResult, StepResult
from agentlightning.types.call import Float32Array, Int32Array


class CountingLearner:
    """Gives every token the log-prob that it was sampled with, and writes down what it is given."""

    def __init__(self) -> None:
        self.version = 0
        self.batches: list[PackedBatch] = []

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        return batch.old_logprobs_E

    async def forward_backward(self, batches: Sequence[PackedBatch], loss: object) -> PassResult:
        self.batches += batches
        logprobs = np.concatenate([batch.old_logprobs_E for batch in batches])
        return PassResult(loss=0.0, logprobs=logprobs, tree_tokens=1, metrics={})

    async def optim_step(self, params: OptimParams) -> StepResult:
        self.version += 1
        return StepResult(version=self.version, grad_norm=1.0)


class CountingEngine:
    """Its version is what was published."""

    def __init__(self) -> None:
        self.version = 0

    async def info(self) -> EngineInfo:
        return EngineInfo(model="", max_context=9, max_concurrency=9, vocab_size=9, eos_ids=(), version=self.version)

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        ids, logprobs = np.ones(3, dtype=np.int32), np.full(3, -1.0, dtype=np.float32)
        yield Chunk(ids=ids, logprobs=logprobs, plain_logprobs=logprobs, version=self.version, finish_reason="length")


class CountingBackend:
    """Keeps versions in its checkpoints, and nothing else."""

    def __init__(self, learners: Mapping[str, Any] | None = None) -> None:
        self.learners = learners or {"policy": CountingLearner()}
        self.engines = {alias: CountingEngine() for alias in self.learners}

    async def start(self) -> None: ...

    def engine(self, policy: str) -> CountingEngine:
        return self.engines[policy]

    def learner(self, policy: str) -> Any:
        return self.learners[policy]

    async def publish(self, policy: str) -> int:
        self.engines[policy].version = self.learners[policy].version
        return self.engines[policy].version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def reseed(self, seed: int) -> None: ...

    async def watch(self) -> NoReturn:
        raise AssertionError("nobody watches it")

    async def stats(self) -> None:
        return None

    async def checkpoint(self, uri: str) -> None:
        for kind in ("model", "optimizer"):
            (Path(uri) / kind).mkdir(parents=True, exist_ok=True)

    async def restore(self, uri: str) -> None: ...

    async def close(self) -> None: ...
