"""What a query may ask for, the same in every store; without a limit it returns all."""

from __future__ import annotations

import pytest

from agentlightning.errors import StoreError
from agentlightning.store import LightningStore
from agentlightning.store.http.client import ITEMS_PER_REQUEST
from agentlightning.store.queries import KEYWORDS, SpanQuery
from agentlightning.types import AttemptedRollout, EnqueueRolloutRequest, RolloutStatus


@pytest.mark.parametrize("kind", KEYWORDS)
def test_keywords_and_record_of_a_query_agree(kind: type) -> None:
    own = {"rollout_id", "attempt_id"} if kind is SpanQuery else set()  # the method's own arguments
    older = {"status", "rollout_ids"}
    assert set(KEYWORDS[kind].__annotations__) - older == set(kind.model_fields) - own  # type: ignore[attr-defined]


@pytest.mark.parametrize("sort_by", [None, "end_time"])
async def test_a_query_without_a_limit_returns_all(store: LightningStore, sort_by: str | None) -> None:
    count = ITEMS_PER_REQUEST + 10
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(count)])
    found = await store.query_rollouts(sort_by=sort_by)
    assert sorted(rollout.input for rollout in found) == list(range(count))
    assert (found.total, found.limit, found.next_cursor) == (count, -1, None)
    assert len(await store.query_rollouts(sort_by=sort_by, offset=count - 3)) == 3
    nothing = await store.query_rollouts(offset=count + 5)
    assert (len(nothing), nothing.total) == (0, count)


async def test_rollouts_come_with_their_latest_attempt_and_by_the_older_words(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("waits")
    begun = await store.start_rollout("runs", worker_id="w")
    (found,) = await store.query_rollouts(status=[RolloutStatus.PREPARING], rollout_ids=[begun.rollout_id])
    assert isinstance(found, AttemptedRollout)
    assert found.attempt.attempt_id == begun.attempt.attempt_id
    (waiting,) = await store.query_rollouts(rollout_id_in=[queued.rollout_id])
    assert not isinstance(waiting, AttemptedRollout)
    await store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="succeeded")  # type: ignore[arg-type]
    (ended,) = await store.wait_for_rollouts(rollout_ids=[begun.rollout_id], timeout=5.0)
    assert isinstance(ended, AttemptedRollout)
    assert ended.attempt.worker_id == "w"


@pytest.mark.contract
async def test_a_query_that_is_not_one_says_so(store: LightningStore) -> None:
    with pytest.raises(TypeError, match="no keyword \\['stauts'\\]"):
        await store.query_rollouts(stauts=["failed"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="older word"):
        await store.query_rollouts(status=[RolloutStatus.FAILED], status_in=[RolloutStatus.FAILED])
    for wrong in ({"limit": -2}, {"offset": -1}, {"sort_order": "up"}, {"status_in": ["lost"]}):
        with pytest.raises(StoreError, match=next(iter(wrong))):
            await store.query_rollouts(**wrong)  # type: ignore[arg-type]
