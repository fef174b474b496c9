"""What is trained is what was sampled: a real run, with a witness between gateway and engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np

from agentlightning.algorithm import GRPO, TrainingContext
from agentlightning.cli.example import load_example
from agentlightning.engine.base import Chunk, Engine, EngineInfo, SamplingParams, concat
from agentlightning.gateway import Gateway
from agentlightning.learner.base import Certificate, LossConfig, OptimParams, PackedBatch
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole
from agentlightning.modelprocess.client import ModelProcess
from agentlightning.modelprocess.protocol import Settings
from agentlightning.models import resolve_model
from agentlightning.rendering import load_rendering
from agentlightning.runner import LitAgentRunner
from agentlightning.store import SqliteLightningStore
from agentlightning.tracer import OtelTracer
from agentlightning.types import RolloutMode
from agentlightning.types.call import Float32Array, Int32Array

STEPS, TASKS, GROUP = 3, 4, 4
Sampled = tuple[tuple[int, ...], tuple[int, ...]]


class WitnessedEngine:
    """Passes everything on to the engine and writes down what it sampled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sampled: list[tuple[Int32Array, Chunk]] = []

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(
        self, prompt_ids: Int32Array, params: SamplingParams, *, stream: bool = False, request_id: str | None = None
    ) -> AsyncGenerator[Chunk, None]:
        chunks: list[Chunk] = []
        async for chunk in self._engine.generate(prompt_ids, params, stream=stream, request_id=request_id):
            chunks.append(chunk)
            yield chunk
        self.sampled.append((prompt_ids.copy(), concat(chunks)))


class WitnessedLearner:
    """Passes everything on to the learner, and first asks it for plain log-probs of what it is about to train."""

    def __init__(self, learner: ModelProcess) -> None:
        self._learner = learner
        self.batches: list[tuple[PackedBatch, Float32Array]] = []

    async def forward_backward(self, batch: PackedBatch, loss: LossConfig) -> dict[str, float]:
        self.batches.append((batch, await self._learner.forward(batch)))
        return await self._learner.forward_backward(batch, loss)

    async def optim_step(self, params: OptimParams) -> dict[str, float]:
        return await self._learner.optim_step(params)

    async def export(self, path: str) -> None:
        await self._learner.export(path)

    async def save_state(self, path: str) -> None:
        await self._learner.save_state(path)

    async def load_state(self, path: str) -> None:
        await self._learner.load_state(path)

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Float32Array:
        return await self._learner.forward(batch, reference=reference)

    async def values(self, batch: PackedBatch) -> Float32Array:
        return await self._learner.values(batch)

    async def certify(self, batch: PackedBatch, loss: LossConfig) -> Certificate:
        return await self._learner.certify(batch, loss)


async def test_every_trained_token_is_a_sampled_token(tmp_path: Path) -> None:
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    path = resolve_model("calc")
    algorithm = GRPO(
        model="calc", group_size=GROUP, tasks_per_step=TASKS, steps=STEPS, learning_rate=2e-4, save_every=100
    )
    async with AsyncExitStack() as stack:
        store = SqliteLightningStore(tmp_path / "store.db")
        stack.push_async_callback(store.close)
        process = ModelProcess(Settings(model=path, max_context=512))
        await process.start()
        stack.push_async_callback(process.close)
        engine, learner = WitnessedEngine(process), WitnessedLearner(process)
        gateway = Gateway(store, engine, load_rendering(path), train_sampling={"temperature": 1.0})
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        runner = LitAgentRunner(OtelTracer(), gateway=gateway)
        runner.init(agent)
        runner.init_worker(0, store)
        stack.callback(runner.teardown)
        reporter = Reporter(JsonlSink(tmp_path / "metrics.jsonl"), SilentConsole())
        stack.callback(reporter.close)
        resources = await store.add_resources({"llm": gateway.as_resource()})
        algorithm.attach(
            TrainingContext(store=store, run_dir=tmp_path, reporter=reporter, resources=resources, learner=learner)
        )
        done = asyncio.Event()
        running = asyncio.create_task(runner.iter(done))
        await algorithm.run(recipe.train_tasks())
        done.set()
        await running
        rollouts = [r for r in await store.query_rollouts(limit=-1) if r.mode is RolloutMode.TRAIN]
        stored = await store.query_calls([r.rollout_id for r in rollouts])
    check_store_against_engine([c for calls in stored.values() for c in calls], engine.sampled)
    check_batches_against_engine(learner.batches, engine.sampled)


def check_store_against_engine(stored: list[Any], sampled: list[tuple[Int32Array, Chunk]]) -> None:
    """Every stored call is, token by token and bit by bit, one that the engine sampled; none is missing."""
    witnessed: dict[Sampled, list[Chunk]] = {}
    for prompt, chunk in sampled:
        witnessed.setdefault((tuple(prompt.tolist()), tuple(chunk.ids.tolist())), []).append(chunk)
    assert len(stored) == len(sampled) > STEPS * TASKS * GROUP
    for call in stored:
        twins = witnessed[tuple(call.prompt_ids.tolist()), tuple(call.response_ids.tolist())]
        assert any(
            np.array_equal(call.logprobs, twin.logprobs)
            and np.array_equal(call.plain_logprobs, twin.plain_logprobs)
            and [run.version for run in call.versions] == [twin.version]
            for twin in twins
        )


def check_batches_against_engine(
    batches: list[tuple[PackedBatch, Float32Array]], sampled: list[tuple[Int32Array, Chunk]]
) -> None:
    """Every trained token follows the very context it was sampled in, and the learner agrees on its log-prob."""
    witnessed: dict[Sampled, set[float]] = {}
    for prompt, chunk in sampled:
        context = prompt.tolist()
        for token, logprob in zip(chunk.ids.tolist(), chunk.plain_logprobs.tolist(), strict=True):
            witnessed.setdefault((tuple(context), (token,)), set()).add(logprob)
            context.append(token)
    trained = 0
    assert len(batches) == STEPS
    for batch, recomputed in batches:
        assert np.abs(recomputed - batch.old_logprobs_E).max() < 1e-4
        for source, target, logprob in zip(
            batch.source_E.tolist(), batch.targets_E.tolist(), batch.old_logprobs_E.tolist(), strict=True
        ):
            assert logprob in witnessed[path_to(batch, source), (target,)]
            trained += 1
    assert trained > 100


def path_to(batch: PackedBatch, source: int) -> tuple[int, ...]:
    """The tokens from the root to `source`, walked up segment by segment."""
    segment = int(np.searchsorted(batch.starts_S, source, side="right")) - 1
    end = source + 1
    pieces: list[list[int]] = []
    while segment >= 0:
        pieces.append(batch.ids_N[batch.starts_S[segment] : end].tolist())
        segment = int(batch.parents_S[segment])
        end = int(batch.starts_S[segment + 1]) if segment + 1 < len(batch.starts_S) else len(batch.ids_N)
    return tuple(token for piece in reversed(pieces) for token in piece)
