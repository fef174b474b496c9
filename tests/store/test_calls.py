"""Calls: every token once in the store, whole arrays back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from agentlightning.errors import ConflictError, StoreError
from agentlightning.store import LightningStore
from agentlightning.store.operations.segments import SegmentRow, SegmentTree
from agentlightning.types import AttemptStatus, VersionRun
from tests.store.builders import make_call, make_segment


@pytest.mark.contract
async def test_turns_share_their_prefix(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    first = make_call(
        claim, "c0", "p0", "r0", make_segment("p0", None, 0, [1, 2, 3]), make_segment("r0", "p0", 3, [4, 5], 7)
    )
    second = make_call(
        claim, "c1", "p1", "r1", make_segment("p1", "r0", 2, [6]), make_segment("r1", "p1", 1, [7, 8, 9], 8)
    )
    rewritten = make_call(
        claim, "c2", "p2", "r2", make_segment("p2", "p0", 1, [10]), make_segment("r2", "p2", 1, [11], 8)
    )
    await store.add_calls([first])
    await store.add_calls([second, rewritten])
    await store.add_calls([first, second])  # a repeated request
    calls = (await store.query_calls([claim.rollout_id, "unknown"]))[claim.rollout_id]
    assert [c.info.call_id for c in calls] == ["c0", "c1", "c2"]
    assert [c.prompt_ids.tolist() for c in calls] == [[1, 2, 3], [1, 2, 3, 4, 5, 6], [1, 10]]
    assert [c.response_ids.tolist() for c in calls] == [[4, 5], [7, 8, 9], [11]]
    assert calls[1].logprobs.tolist() == [0, -1, -2]
    assert calls[1].plain_logprobs.tolist() == [-1, -2, -3]
    assert calls[1].versions == (VersionRun(0, 8),)
    assert calls[0].info == first.info
    assert calls[0].prompt_ids.base is not None  # a view of the longest path
    assert not calls[0].prompt_ids.flags.writeable
    assert (await store.statistics())["total_calls"] == 3
    assert len(await store.query_spans(claim.rollout_id)) == 3


@pytest.mark.contract
async def test_a_response_of_several_segments(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    segments = [
        make_segment("p", None, 0, [1]),
        make_segment("a", "p", 1, [2, 3], 1),
        make_segment("b", "a", 2, [4], 2, kept=[3, 4, 8, 9]),
        make_segment("c", "b", 1, [5]),
    ]
    await store.add_calls([make_call(claim, "x", "p", "c", *segments), make_call(claim, "empty", "c", "c")])
    call, empty = (await store.query_calls([claim.rollout_id]))[claim.rollout_id]
    assert call.response_ids.tolist() == [2, 3, 4, 5]
    assert call.versions == (VersionRun(0, 1), VersionRun(2, 2))
    assert call.logprobs[:3].tolist() == [0, -1, 0]
    assert call.kept is not None
    assert call.kept.tolist() == [0, 0, 3, 0, 4, 8, 9], "nothing was cut away but from the third token"
    assert empty.kept is None
    assert np.isnan(call.logprobs[3])
    assert (empty.prompt_ids.tolist(), empty.response_ids.tolist()) == ([1, 2, 3, 4, 5], [])


async def test_calls_of_other_attempts_are_left_out(store: LightningStore) -> None:
    first = await store.start_rollout(1)
    segments = (make_segment("p", None, 0, [1]), make_segment("r", "p", 1, [2], 1))
    await store.add_calls([make_call(first, "old", "p", "r", *segments)])
    await store.update_attempt(first.rollout_id, "latest", status=AttemptStatus.UNRESPONSIVE)
    second = await store.start_attempt(first.rollout_id)
    await store.add_calls([make_call(second, "new", "p", "r", *segments)])
    latest = (await store.query_calls([first.rollout_id]))[first.rollout_id]
    assert [c.info.call_id for c in latest] == ["new"]
    everything = await store.query_calls([first.rollout_id], latest_attempt_only=False)
    assert [c.info.call_id for c in everything[first.rollout_id]] == ["old", "new"]


async def test_segments_that_hang_in_the_air_are_refused(store: LightningStore) -> None:
    claim = await store.start_rollout(1)
    with pytest.raises(ConflictError, match="'nowhere'"):
        await store.add_calls([make_call(claim, "c", "p", "p", make_segment("p", "nowhere", 1, [1]))])
    with pytest.raises(ConflictError, match="'p'"):
        await store.add_calls([make_call(claim, "c", "p", "p", make_segment("p", "p", 1, [1]))])
    segments = make_segment("p", None, 0, [1]), make_segment("q", "p", 5, [1])
    with pytest.raises(StoreError, match="keeps 5 tokens"):
        await store.add_calls([make_call(claim, "c", "p", "q", *segments)])
    await store.add_calls([make_call(claim, "c", "p", "p", make_segment("p", None, 0, [1]))])
    with pytest.raises(ConflictError, match="5 tokens of segment 'p'"):
        await store.add_calls([make_call(claim, "d", "q", "q", make_segment("q", "p", 5, [1]))])
    assert (await store.statistics())["total_calls"] == 1


async def test_very_long_conversations(store: LightningStore) -> None:
    """Deeper than Python's recursion limit, and memory for one path."""
    claim = await store.start_rollout(1)
    records = []
    for turn in range(1500):
        parent = f"r{turn - 1}" if turn else None
        prompt = make_segment(f"p{turn}", parent, 2 if turn else 0, [turn, turn])
        response = make_segment(f"r{turn}", f"p{turn}", 2, [turn, turn], 1)
        records.append(make_call(claim, f"c{turn}", f"p{turn}", f"r{turn}", prompt, response))
    await store.add_calls(records)
    calls = (await store.query_calls([claim.rollout_id]))[claim.rollout_id]
    assert len(calls[-1].prompt_ids) == 4 * 1499 + 2
    assert calls[10].prompt_ids.base is calls[-1].prompt_ids.base


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 5)), min_size=1, max_size=25))
def test_paths_equal_a_plain_reassembly(shape: list[tuple[int, int, int]]) -> None:
    """Any tree of segments gives the arrays that following the definition by hand gives."""
    rows: list[SegmentRow] = []
    expected: list[tuple[list[int], list[int]]] = []  # path before the segment, and its own ids
    for number, (pick, keep, length) in enumerate(shape):
        own = list(range(100 * number, 100 * number + length))
        ids = np.array(own, dtype="<i4").tobytes()
        parent = pick % (number + 1) - 1
        if parent < 0:
            rows.append(SegmentRow(str(number), None, 0, ids, None, None, None))
            expected.append(([], own))
            continue
        before, tokens = expected[parent]
        kept = keep % (len(tokens) + 1)
        rows.append(SegmentRow(str(number), str(parent), kept, ids, None, None, None))
        expected.append((before + tokens[:kept], own))
    tree = SegmentTree(rows)
    for number, (before, own) in enumerate(expected):
        assert tree.path(str(number)).tolist() == before + own
