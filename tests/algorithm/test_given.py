"""Triplets that an agent returned are trained as given: those calls, each with its own reward."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import Episode, make_episode
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import Attempt, AttemptedRollout, Outcome, Rollout, Span, Triplet
from agentlightning.types.names import TRIPLET, TRIPLET_JSON
from tests.algorithm.test_credit import make_call


async def run(*triplets: Triplet) -> tuple[AttemptedRollout, list[Span]]:
    """What the runner records of an agent that returns these."""
    store = InMemoryLightningStore()
    runner = LitAgentRunner(DummyTracer())

    @agl.rollout
    async def agent(task: str) -> Any:
        return list(triplets)

    runner.init(agent)
    runner.init_worker(0, store)
    async with asyncio.timeout(20):
        rollout = await runner.step("task")
    spans = list(await store.query_spans(rollout.rollout_id))
    await store.close()
    return rollout, spans


def episode(name: str, spans: list[Span]) -> Episode:
    """A rollout with three calls (responses resp-0 … resp-2 of 1, 2, 3 tokens)."""
    calls = [make_call(i, i + 1, tuple(range(i + 1)), None, None, name) for i in range(3)]
    attempt = Attempt(rollout_id=name, attempt_id="a", sequence_id=1, start_time=0.0, outcome=Outcome.OK)
    return make_episode(
        Rollout(rollout_id=name, input=1, start_time=0.0, metadata={"group": "g"}), attempt, calls, spans
    )


def named(response: str, reward: float) -> Triplet:
    return Triplet(prompt="", response="", reward=reward, metadata={"response_id": response})


async def test_the_runner_records_them_and_the_last_reward_shows() -> None:
    rollout, spans = await run(named("resp-0", 0.5), named("resp-2", 1.0))
    assert rollout.attempt.outcome is Outcome.OK
    assert agl.find_final_reward(spans) == 1.0


async def test_triplets_without_any_reward_are_an_agent_error() -> None:
    rollout, _ = await run(Triplet(prompt="p", response="r"))
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR


@pytest.mark.parametrize("mode", ["broadcast", "return_to_go"])
async def test_each_call_is_trained_with_its_own_reward_and_no_other_call(mode: Any) -> None:
    _, good = await run(named("resp-0", 1.0), named("resp-2", 0.0))
    _, bad = await run(named("resp-0", 0.0), named("resp-2", 1.0))
    (batch,) = credit([episode("x", good), episode("y", bad)], CreditRule(mode=mode))
    found = {c.call.info.call_id: float(c.advantages[0]) for c in batch}
    assert set(found) == {"x-0", "x-2", "y-0", "y-2"}, "resp-1 was not given"
    assert found["x-0"] > 0
    assert found["x-2"] < 0
    assert found["y-0"] < 0
    assert found["y-2"] > 0


async def test_a_triplet_means_the_call_with_its_tokens() -> None:
    ids = {"prompt": {"token_ids": [0, 1]}, "response": {"token_ids": [1, 1]}}
    _, spans = await run(Triplet(**ids, reward=1.0))
    assert [c.info.trained for c in episode("x", spans).calls] == [False, True, False]


async def test_tokens_of_its_own_need_their_logprobs(caplog: pytest.LogCaptureFixture) -> None:
    ids: Any = {"prompt": {"token_ids": [9, 9]}, "response": {"token_ids": [8, 7]}}
    _, spans = await run(Triplet(**ids, reward=1.0, metadata={"logprobs": [-0.5, -1.0]}), Triplet(**ids, reward=0.5))
    found = episode("x", spans)
    assert [c.info.trained for c in found.calls] == [False, False, False, True]
    own = found.calls[3]
    assert own.response_ids.tolist() == [8, 7]
    assert np.allclose(own.plain_logprobs, [-0.5, -1.0])
    assert "logprobs" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": {"token_ids": []}},
        {"response": {"token_ids": [-3]}},
        {"response": {"token_ids": ["three"]}},
        {"response": {"token_ids": [[3]]}},
        {"metadata": {"logprobs": [float("nan")]}},
        {"metadata": {"logprobs": [-1.0, -1.0]}},
        {"metadata": {"logprobs": "many"}},
    ],
    ids=str,
)
async def test_tokens_that_cannot_be_trained_are_said_and_left_out(
    wrong: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fine = {"prompt": {"token_ids": [9, 8]}, "response": {"token_ids": [3]}, "metadata": {"logprobs": [-1.0]}}
    _, spans = await run(Triplet(**fine, reward=1.0), Triplet(**{**fine, **wrong}, reward=0.5))
    assert [c.prompt_ids.tolist() for c in episode("x", spans).calls if c.info.trained] == [[9, 8]]
    assert "is not trained" in caplog.text


async def test_a_span_that_only_looks_like_a_triplet_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    _, spans = await run(named("resp-0", 0.5))
    triplet = next(s for s in spans if s.name == TRIPLET)
    broken = [triplet.model_copy(update={"attributes": attributes}) for attributes in ({}, {TRIPLET_JSON: "{"})]
    assert [c.info.trained for c in episode("x", [*spans, *broken]).calls] == [True, False, False]
    assert caplog.text.count("cannot be read") == 2
