"""Every write, many times at once: one effect, the same answer for all. What a client does whose answers get lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentlightning.errors import ConflictError
from agentlightning.store import LightningStore
from agentlightning.types import LLM, AttemptStatus, EnqueueRolloutRequest, Outcome, RolloutStatus
from tests.store.builders import make_call, make_segment, make_span

TIMES = 12
pytestmark = pytest.mark.contract


async def together(write: Callable[[], Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*[write() for _ in range(TIMES)]))


def same(answers: list[Any]) -> Any:
    assert all(answer == answers[0] for answer in answers[1:]), answers
    return answers[0]


async def test_the_life_of_a_rollout(store: LightningStore) -> None:
    llm = LLM(endpoint="http://x/v1", model="m")
    resources = same(await together(lambda: store.add_resources({"main": llm}, "rs")))
    assert resources.version == 1
    requests = [EnqueueRolloutRequest(input=n, rollout_id=f"r{n}") for n in range(3)]
    same(await together(lambda: store.enqueue_many_rollouts(requests)))

    claims = await together(lambda: store.dequeue_many_rollouts(2, "w", attempt_ids=["a0", "a1"]))
    ids = {tuple((c.rollout_id, c.attempt.attempt_id, c.attempt.sequence_id) for c in answer) for answer in claims}
    assert ids == {(("r0", "a0", 1), ("r1", "a1", 1))}
    first, _ = claims[0]

    spans = [make_span(first, str(n)) for n in range(3)]
    stored = await together(lambda: store.add_many_spans(spans))
    assert sorted(len(answer) for answer in stored) == [0] * (TIMES - 1) + [3]
    call = make_call(first, "c", "p", "r", make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, [3], 4))
    await together(lambda: store.add_calls([call]))

    def finish() -> Awaitable[Any]:
        return store.update_attempt("r0", "a0", status=AttemptStatus.FAILED, outcome=Outcome.JUDGE_ERROR, error="no")

    finished = same(await together(finish))
    assert (finished.outcome, finished.error) == (Outcome.JUDGE_ERROR, "no")
    same(await together(lambda: store.update_rollout("r1", status=RolloutStatus.CANCELLED)))
    same(await together(lambda: store.update_attempt("r1", "a1", status=AttemptStatus.CANCELLED)))
    started = await together(lambda: store.start_rollout(9, worker_id="w", rollout_id="r9", attempt_id="a9"))
    assert {(s.rollout_id, s.attempt.attempt_id, s.attempt.sequence_id) for s in started} == {("r9", "a9", 1)}

    statistics = await store.statistics()
    counts = {name: n for name, n in statistics["rollouts"].items() if n}
    assert counts == {"queuing": 1, "failed": 1, "cancelled": 1, "preparing": 1}
    assert {name: n for name, n in statistics["attempts"].items() if n} == {"failed": 1, "cancelled": 1, "preparing": 1}
    totals = statistics["total_spans"], statistics["total_calls"], statistics["total_resources"]
    assert totals == (4, 1, 1)
    assert statistics["total_workers"] == 1
    numbers = [span.sequence_id for span in await store.query_spans("r0")]
    assert numbers == [1, 2, 3, 4]


async def test_of_different_endings_at_the_same_moment_one_counts(store: LightningStore) -> None:
    for number in range(3):
        claim = await store.start_rollout(number)
        endings = [AttemptStatus.SUCCEEDED, AttemptStatus.FAILED, AttemptStatus.TIMEOUT, AttemptStatus.CANCELLED] * 3
        answers = await asyncio.gather(
            *[store.update_attempt(claim.rollout_id, "latest", status=status) for status in endings],
            store.update_rollout(claim.rollout_id, status=RolloutStatus.CANCELLED),
            return_exceptions=True,
        )
        assert all(isinstance(a, ConflictError) for a in answers if isinstance(a, BaseException)), answers
        attempt = await store.get_latest_attempt(claim.rollout_id)
        assert attempt is not None
        told = {a.status for a in answers[:-1] if not isinstance(a, BaseException)}
        assert told <= {attempt.status}, "nobody was told of another end than the one that is stored"
    statistics = await store.statistics()
    assert sum(statistics["rollouts"].values()) == sum(statistics["attempts"].values()) == 3


@pytest.mark.slow
async def test_waiting_claimers_are_served_in_turn(store: LightningStore) -> None:
    """Those that wait longest are called first, and none starves beside one that always comes back."""
    served: list[int] = []

    async def claimer(number: int) -> None:
        while (claim := await store.dequeue_rollout(f"w{number}", timeout=1.5)) is not None:
            served.append(number)
            await store.update_attempt(claim.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)

    claimers = [asyncio.create_task(claimer(number)) for number in range(5)]
    await asyncio.sleep(0.3)
    for number in range(50):
        await store.enqueue_rollout(number)
        await asyncio.sleep(0.01)
    await asyncio.gather(*claimers)
    assert len(served) == 50
    assert min(served.count(number) for number in range(5)) >= 3, served
