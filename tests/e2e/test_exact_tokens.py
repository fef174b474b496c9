"""What is trained is what was sampled: a real run, with a witness between gateway and engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agentlightning.algorithm import GRPO
from agentlightning.backend import ModelSpec
from agentlightning.backend.embedded.backend import EmbeddedBackend
from agentlightning.engine.base import Chunk, Engine, EngineInfo, SamplingParams, concat
from agentlightning.learner.base import Learner, LossConfig, PackedBatch, PassResult
from agentlightning.metrics import SilentConsole
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer import Trainer
from agentlightning.trainer.example import load_example
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
        if params.seed is None:  # the loop's own check after each publish brings one, the agent none
            self.sampled.append((prompt_ids.copy(), concat(chunks)))


class WitnessedLearner:
    """Passes everything on to the learner, and first asks it for plain log-probs of what it is about to train."""

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self.batches: list[tuple[PackedBatch, Float32Array]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    async def forward_backward(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        self.batches += [(batch, await self._learner.forward(batch)) for batch in batches]
        return await self._learner.forward_backward(batches, loss)


class Witnessed(EmbeddedBackend):
    """Its engine and its learner are witnessed. `made` holds the last one, for the test."""

    made: Witnessed

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.witnessed = WitnessedEngine(super().engine("policy")), WitnessedLearner(super().learner("policy"))
        Witnessed.made = self

    def engine(self, policy: str) -> Any:
        return self.witnessed[0]

    def learner(self, policy: str) -> Any:
        return self.witnessed[1]


async def test_every_trained_token_is_a_sampled_token(tmp_path: Path) -> None:
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    settings = {"group_size": GROUP, "tasks_per_step": TASKS, "steps": STEPS, "learning_rate": 2e-4, "max_context": 512}
    algorithm = GRPO(model="calc", backend=Witnessed, **settings)
    trainer = Trainer(algorithm=algorithm, run_dir=tmp_path, console=SilentConsole())
    await trainer.fit_async(agent, recipe.train_tasks())
    engine, learner = Witnessed.made.witnessed
    store = SqliteLightningStore(tmp_path / "store.db")
    try:
        rollouts = [r for r in await store.query_rollouts(limit=-1) if r.mode is RolloutMode.TRAIN]
        stored = await store.query_calls([r.rollout_id for r in rollouts])
    finally:
        await store.close()
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
    assert STEPS <= len(batches) <= STEPS + 1, "the first step is in two halves where two groups of it differ"
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
