"""A backend that knows nothing of the package but its seams: a table of bigram logits, learner and engine apart.

What a user's own backend looks like. Publishing copies the learner's table to the engine; a subclass that breaks it
shows what the loop makes of that.
"""
# ruff: noqa: ASYNC240 - small files of a test

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from agentlightning.backend import BackendStats, ModelSpec
from agentlightning.engine.base import Chunk, EngineInfo, SamplingParams
from agentlightning.learner.base import LossConfig, OptimParams, PackedBatch, PassResult, StepResult
from agentlightning.models import resolve_model
from agentlightning.types.call import Float32Array, Int32Array


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


class BigramEngine:
    def __init__(self, model: str, vocabulary: int, end: int, spec: ModelSpec) -> None:
        self.table = np.zeros((vocabulary, vocabulary))
        self.version = 0
        self.random = np.random.default_rng(spec.seed)
        self._info = (model, spec, vocabulary, end)

    async def info(self) -> EngineInfo:
        model, spec, vocabulary, end = self._info
        return EngineInfo(
            model=model,
            max_context=spec.max_context,
            max_concurrency=spec.max_concurrency,
            vocab_size=vocabulary,
            eos_ids=(end,),
            version=self.version,
        )

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(0)
        random = self.random if params.seed is None else np.random.default_rng(params.seed)
        limit = min(params.max_tokens or 8, 8)
        ids, logprobs, last = [], [], int(prompt_ids[-1])
        ends = {self._info[3], *params.stop_token_ids}
        while len(ids) < limit and (not ids or ids[-1] not in ends):
            row = log_softmax(self.table[last] / (params.temperature or 1.0))
            last = int(random.choice(len(row), p=np.exp(row)))
            ids.append(last)
            logprobs.append(row[last])
        values = np.array(logprobs, dtype=np.float32)
        yield Chunk(
            ids=np.array(ids, dtype=np.int32),
            logprobs=values,
            plain_logprobs=values,
            version=self.version,
            finish_reason="stop" if ids[-1] in ends else "length",
        )


class BigramLearner:
    """It can compare no packed passes with rows: its trees are rows."""

    def __init__(self, engine: BigramEngine, source: Path) -> None:
        self.table = engine.table.copy()
        self.gradient = np.zeros_like(self.table)
        self.version = 0
        self._source = source

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        rows = log_softmax(self.table[batch.ids_N[batch.source_E]] / batch.temperature_E[:, None])
        return rows[np.arange(len(rows)), batch.targets_E].astype(np.float32)

    async def values(self, batch: PackedBatch) -> Float32Array:
        raise NotImplementedError("a table has no critic")

    async def forward_backward(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        """The gradient of Σ w A log π."""
        logprobs = [await self.forward(batch) for batch in batches]
        for batch in batches:
            before = batch.ids_N[batch.source_E]
            push = batch.weights_E * batch.advantages_E
            chances = np.exp(log_softmax(self.table[before]))
            np.add.at(self.gradient, before, -push[:, None] * chances)
            np.add.at(self.gradient, (before, batch.targets_E), push)
        return PassResult(
            loss=float(-sum((b.weights_E * b.advantages_E * p).sum() for b, p in zip(batches, logprobs, strict=True))),
            logprobs=np.concatenate(logprobs),
            tree_tokens=sum(len(b.ids_N) for b in batches),
            metrics={},
        )

    async def optim_step(self, params: OptimParams) -> StepResult:
        norm = float(np.linalg.norm(self.gradient))
        self.table += params.learning_rate * self.gradient
        self.gradient[:] = 0
        self.version += 1
        return StepResult(version=self.version, grad_norm=norm)

    async def save_state(self, uri: str) -> None:
        Path(uri).mkdir(parents=True, exist_ok=True)
        (Path(uri) / "version.json").write_text(json.dumps(self.version))

    async def load_state(self, uri: str) -> None:
        self.version = json.loads((Path(uri) / "version.json").read_text())

    async def export(self, uri: str) -> None:
        shutil.copytree(self._source, uri, dirs_exist_ok=True)
        np.save(Path(uri) / "table.npy", self.table)


class BigramBackend:
    """One policy. Starts from the table in the model's directory, if there is one."""

    def __init__(self, spec: ModelSpec) -> None:
        source = Path(resolve_model(spec.model))
        config = json.loads((source / "config.json").read_text())
        self._engine = BigramEngine(str(source), config["vocab_size"], config["eos_token_id"], spec)
        if (source / "table.npy").exists():
            self._engine.table = np.load(source / "table.npy")
        self._learner = BigramLearner(self._engine, source)
        self._over = asyncio.Event()

    async def start(self) -> None: ...

    def engine(self, policy: str) -> BigramEngine:
        return self._engine

    def learner(self, policy: str) -> BigramLearner:
        return self._learner

    async def publish(self, policy: str) -> int:
        self._engine.table = self._learner.table.copy()
        self._engine.version = self._learner.version
        return self._engine.version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def reseed(self, seed: int) -> None:
        self._engine.random = np.random.default_rng(seed)

    async def watch(self) -> NoReturn:
        await self._over.wait()
        raise AssertionError

    async def stats(self) -> BackendStats | None:
        return None

    async def checkpoint(self, uri: str) -> None:
        await self._learner.export(f"{uri}/model")
        await self._learner.save_state(f"{uri}/optimizer")

    async def restore(self, uri: str) -> None:
        await self._learner.load_state(f"{uri}/optimizer")
        await self.publish("policy")

    async def close(self) -> None: ...
