"""Export, import and retention."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentlightning.errors import StoreError
from agentlightning.store import SqliteLightningStore
from agentlightning.types import AttemptStatus, RolloutMode
from tests.store.builders import make_call, make_segment, make_span


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[SqliteLightningStore]:
    """Five finished rollouts with a call and two spans each, one that runs, one that is queued."""
    store = SqliteLightningStore(tmp_path / "filled.db")
    for number in range(6):
        claim = await store.start_rollout(
            {"n": number} if number else None, mode=RolloutMode.TRAIN, metadata={"group": "g"}, rollout_id=f"r{number}"
        )
        await store.add_span(make_span(claim, "é", value=[1, None]))
        segments = make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, [3], 4)
        await store.add_calls([make_call(claim, "c", "p", "r", *segments)])
        if number < 5:
            await store.update_attempt(claim.rollout_id, "latest", status=AttemptStatus.FAILED, error="boom")
    await store.enqueue_rollout("queued", rollout_id="queued")
    yield store
    await store.close()


async def test_what_is_exported_can_be_imported(filled: SqliteLightningStore, tmp_path: Path) -> None:
    lines = [line async for line in filled.export_lines()]
    assert len(lines) == 5
    other = SqliteLightningStore(tmp_path / "other.db")
    assert await other.import_lines(lines) == 5
    assert await other.import_lines(lines) == 0
    for number in range(5):
        rollout_id = f"r{number}"
        assert await other.get_rollout_by_id(rollout_id) == await filled.get_rollout_by_id(rollout_id)
        assert await other.query_spans(rollout_id) == await filled.query_spans(rollout_id)
        (mine,) = (await filled.query_calls([rollout_id]))[rollout_id]
        (theirs,) = (await other.query_calls([rollout_id]))[rollout_id]
        assert theirs.info == mine.info
        assert theirs.prompt_ids.tolist() == mine.prompt_ids.tolist()
        assert theirs.logprobs.tolist() == mine.logprobs.tolist()
    statistics = await other.statistics()
    assert statistics["rollouts"]["failed"] == statistics["attempts"]["failed"] == statistics["total_calls"] == 5
    assert statistics["total_spans"] == 10
    assert [line async for line in other.export_lines()] == lines
    with pytest.raises(StoreError, match="not an exported rollout"):
        await other.import_lines([b'{"rollout": 1}'])
    await other.close()


async def test_retention(filled: SqliteLightningStore) -> None:
    assert await filled.prune(keep=5) == 0
    assert await filled.prune(keep=3) == 2
    left = [r.rollout_id for r in await filled.query_rollouts()]
    assert left == ["r2", "r3", "r4", "r5", "queued"]
    assert (await filled.query_spans("r0")).total == 0
    statistics = await filled.statistics()
    assert (statistics["total_rollouts"], statistics["total_attempts"]) == (5, 4)
    assert (statistics["total_spans"], statistics["total_calls"]) == (8, 4)
    third = await filled.get_rollout_by_id("r3")
    assert third is not None
    assert third.end_time is not None
    assert await filled.prune(finished_before=third.end_time) == 1
    assert await filled.prune(finished_before=third.end_time + 3600) == 2
    assert [r.rollout_id for r in await filled.query_rollouts()] == ["r5", "queued"]
