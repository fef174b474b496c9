"""Pages by cursor: the same answer in parts, whatever comes in between."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from agentlightning.errors import StoreError
from agentlightning.store import LightningStore
from agentlightning.types import EnqueueRolloutRequest
from tests.store.builders import make_span


@pytest.mark.parametrize(
    ("sort_by", "order"), [(None, "asc"), ("start_time", "desc"), ("status", "asc"), ("rollout_id", "desc")]
)
async def test_pages_by_cursor_give_what_one_page_gives(store: LightningStore, sort_by: str, order: Any) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(23)])
    for _ in range(7):
        await store.dequeue_rollout("w")
    whole = [r.rollout_id for r in await store.query_rollouts(sort_by=sort_by, sort_order=order)]
    seen: list[str] = []
    cursor = None
    while True:
        page = await store.query_rollouts(sort_by=sort_by, sort_order=order, limit=5, cursor=cursor)
        assert page.total == 23
        seen += [r.rollout_id for r in page]
        if (cursor := page.next_cursor) is None:
            break
    assert seen == whole


@pytest.mark.contract
async def test_what_is_added_between_pages_shifts_nothing(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(6)])
    first = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=3)
    await store.enqueue_rollout("new")
    second = await store.query_rollouts(sort_by="start_time", sort_order="desc", limit=3, cursor=first.next_cursor)
    assert [r.input for r in (*first, *second)] == [5, 4, 3, 2, 1, 0]


async def test_a_cursor_that_does_not_fit_is_refused(store: LightningStore) -> None:
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n) for n in range(3)])
    cursor = (await store.query_rollouts(limit=1)).next_cursor
    with pytest.raises(StoreError, match="next_cursor as it is"):
        await store.query_rollouts(limit=1, cursor="nonsense")
    with pytest.raises(StoreError, match="belongs to a query sorted by None asc"):
        await store.query_rollouts(sort_by="status", limit=1, cursor=cursor)
    with pytest.raises(StoreError, match="not both"):
        await store.query_rollouts(limit=1, cursor=cursor, offset=1)
    ended = (await store.query_rollouts(sort_by="rollout_id", limit=1)).next_cursor
    assert ended is not None
    with pytest.raises(StoreError, match="may be empty"):
        await store.query_rollouts(sort_by="end_time", limit=1, cursor=_resorted(ended, "end_time"))


def _resorted(cursor: str, sort_by: str) -> str:
    values = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    return base64.urlsafe_b64encode(json.dumps([sort_by, *values[1:]]).encode()).decode().rstrip("=")


@pytest.mark.contract
async def test_spans_and_resources_have_cursors_too(store: LightningStore) -> None:
    claim = await store.start_rollout("task")
    await store.add_many_spans([make_span(claim, f"s{n}") for n in range(5)])
    page = await store.query_spans(claim.rollout_id, limit=3)
    rest = await store.query_spans(claim.rollout_id, limit=3, cursor=page.next_cursor)
    assert [s.sequence_id for s in (*page, *rest)] == [1, 2, 3, 4, 5]
    assert rest.next_cursor is None
