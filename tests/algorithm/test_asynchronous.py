"""Sampling ahead: never further than it may, nothing twice; without staleness the updates are those of a plain loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.episode import Earned, Episode, Sampled
from agentlightning.algorithm.sampling.source import AsynchronousSampling
from agentlightning.algorithm.update import Updater
from agentlightning.errors import EngineError
from agentlightning.learner.base import LossConfig, OptimParams, PackedBatch, PassResult, StepResult, joined
from agentlightning.learner.policy import load_policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.metrics import JsonlSink, Reporter, SilentConsole
from agentlightning.types.call import VersionRun

from .test_credit import episode


class InProcess:
    """The learner's seam without a process of its own."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)
        self.inner = TorchLearner(load_policy(model, device="cpu"))

    async def forward(self, batch: PackedBatch, *, reference: bool = False) -> Any:
        await asyncio.sleep(0)
        return self.inner.forward(batch, reference=reference)

    async def forward_backward(self, batches: Sequence[PackedBatch], loss: LossConfig) -> PassResult:
        await asyncio.sleep(0)
        return joined([self.inner.forward_backward(batch, loss) for batch in batches])

    async def optim_step(self, params: OptimParams) -> StepResult:
        await asyncio.sleep(0)
        return self.inner.optim_step(params)

    def weights(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.inner.policy.model.parameters()]


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    reporter = Reporter(JsonlSink(tmp_path / "m.jsonl"), SilentConsole())
    yield reporter
    reporter.close()


def recorded(steps: int, learner: InProcess) -> list[list[Episode]]:
    """Rollouts as if sampled step after step, with the log-probs of the first weights."""
    from agentlightning.learner.packing import CreditedCall, pack

    rng = np.random.default_rng(0)
    found = []
    for step in range(steps):
        episodes = []
        for number in range(8):
            e = episode(f"{step}-{number // 4}", [(float(rng.random()), 1)], name=f"{step}-{number}")
            calls = []
            for call in e.calls:
                n = len(call.response_ids)
                ids = rng.integers(0, 250, n).astype(np.int32)
                zeros = np.zeros(n, np.float32)
                fresh = replace(call, response_ids=ids, versions=(VersionRun(0, 0),))
                logprobs = learner.inner.forward(pack([CreditedCall(fresh, 0, 0, zeros, zeros)]))
                calls.append(replace(fresh, plain_logprobs=logprobs, logprobs=logprobs))
            episodes.append(replace(e, calls=calls, rewards=[Earned(e.reward or 0.0, 1)]))
        found.append(episodes)
    return found


def settings(**more: Any) -> GRPO:
    return GRPO(**{"model": "calc", "tasks_per_step": 2, "group_size": 4, "max_logprob_gap": 10.0, **more})


async def through_ahead(model: Path, steps: list[list[Episode]], reporter: Reporter, staleness: int) -> list[bytes]:
    learner = InProcess(model)
    updater = Updater(settings(max_staleness=staleness), learner, reporter)  # pyright: ignore[reportArgumentType]

    async def sample(step: int, position: int) -> Sampled | None:
        await asyncio.sleep(0.001)
        return Sampled(steps[step - 1], [position], position + 1, 0.0, 0.0) if step <= len(steps) else None

    done = 0
    async with AsynchronousSampling(sample, done=0, position=0, max_staleness=staleness) as ahead:
        while (sampled := await ahead.next(done)) is not None:
            await updater.learn(sampled.episodes, 1e-3)
            done += 1
    assert done == len(steps)
    return learner.weights()


@pytest.mark.slow
async def test_without_staleness_replayed_rollouts_give_the_plain_loops_weights_bit_for_bit(
    tiny_model_dir: Path, reporter: Reporter
) -> None:
    plain = InProcess(tiny_model_dir)
    steps = recorded(4, plain)
    updater = Updater(settings(), plain, reporter)  # pyright: ignore[reportArgumentType]
    before = plain.weights()
    for episodes in steps:
        await updater.learn(episodes, 1e-3)
    assert plain.weights() != before
    assert await through_ahead(tiny_model_dir, steps, reporter, staleness=0) == plain.weights()
    assert await through_ahead(tiny_model_dir, steps, reporter, staleness=1) != plain.weights(), (
        "corrected for staleness"
    )


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
async def test_sampling_never_runs_further_ahead_than_it_may(staleness: int) -> None:
    learned = 0
    furthest = 0

    async def sample(step: int, position: int) -> Sampled | None:
        nonlocal furthest
        assert position == step - 1, "tasks are taken in order, each once"
        furthest = max(furthest, step - 1 - learned)
        await asyncio.sleep(0)
        return Sampled([], [position], position + 1, 0.0, 0.0) if step <= 10 else None

    async with AsynchronousSampling(sample, done=0, position=0, max_staleness=staleness) as ahead:
        while (sampled := await ahead.next(learned)) is not None:
            assert sampled.tasks == [learned]
            await asyncio.sleep(0.01)  # learning; sampling goes on meanwhile, if it may
            learned += 1
    assert learned == 10
    assert furthest == staleness


async def test_what_sampling_raises_arrives_after_what_was_sampled() -> None:
    async def sample(step: int, position: int) -> Sampled | None:
        if step == 2:
            raise ValueError("the agent is broken")
        return Sampled([], [0], 1, 0.0, 0.0)

    async with AsynchronousSampling(sample, done=0, position=0, max_staleness=1) as ahead:
        assert await ahead.next(0) is not None
        with pytest.raises(ValueError, match="broken"):
            await ahead.next(1)


async def test_overlong_rollouts_are_counted(tiny_model_dir: Path, reporter: Reporter) -> None:
    learner = InProcess(tiny_model_dir)
    (episodes,) = recorded(1, learner)
    longest = max(e.sampled_tokens for e in episodes)
    for tokens, margin, wanted in [(longest + 1, 0, 0), (longest, 1, len(episodes)), (longest + 5, 5, 0)]:
        overlong: Any = settings(overlong_tokens=tokens, overlong_margin=margin)
        metrics = await Updater(overlong, learner, reporter).learn(episodes, 0.0)  # pyright: ignore[reportArgumentType]
        assert metrics["overlong"] == wanted


def shifted(episodes: list[Episode], gap: float, version: int | None) -> list[Episode]:
    """What an engine that is `gap` off would have recorded under weights `version` (None: nobody knows)."""

    def wrong(call: Any) -> Any:
        versions = () if version is None else (VersionRun(0, version),)
        return replace(call, plain_logprobs=call.plain_logprobs - gap, versions=versions)

    return [replace(e, calls=[wrong(c) for c in e.calls]) for e in episodes]


@pytest.mark.parametrize("more", [{}, {"max_staleness": 1}, {"quorum": 0.5}], ids=["sync", "ahead", "quorum"])
async def test_an_engine_that_is_off_is_found_out_in_every_mode(
    tiny_model_dir: Path, reporter: Reporter, more: dict[str, Any]
) -> None:
    """By the tokens that the learner's own weights sampled, and by those alone."""
    learner = InProcess(tiny_model_dir)
    (episodes,) = recorded(1, learner)
    updater = Updater(settings(max_logprob_gap=None, **more), learner, reporter)  # pyright: ignore[reportArgumentType]
    metrics = await updater.learn(shifted(episodes, 0.1, None), 0.0)
    assert "logprob_gap_max" not in metrics, "triplets sampled elsewhere"
    await updater.learn(shifted(episodes, 0.1, 0), 0.0)  # of older weights: the version is 1 now
    metrics = await updater.learn(shifted(episodes, 1e-4, 2), 0.0)
    assert metrics["logprob_gap_max"] == pytest.approx(1e-4, rel=0.05)
    with pytest.raises(EngineError, match="differ by"):
        await updater.learn(shifted(episodes, 0.1, 3), 0.0)
