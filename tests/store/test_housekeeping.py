"""Export, import and retention."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random

import pytest

from agentlightning.errors import ConflictError, StoreError
from agentlightning.store import SqliteLightningStore
from agentlightning.types import AttemptStatus, RecordedAttempt, Resource, RolloutConfig, RolloutMode
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


def _spoiled(line: bytes) -> Iterator[tuple[str, str, bytes]]:
    """The line with one value after the other made wrong, missing, or another's."""
    whole = json.loads(line)
    for table, rows in whole.items():
        row = rows if table == "rollout" else rows[-1]
        for name in row:
            for value in (None, -1, 1.5, "x", "running", [1], {"a": 1}, 2**70, "AAAA", "absent"):
                if value == row[name]:
                    continue
                copy = json.loads(line)
                spoiled = copy[table] if table == "rollout" else copy[table][-1]
                spoiled[name] = value
                if value == "absent":
                    del spoiled[name]
                yield table, name, json.dumps(copy).encode()
        yield table, "*", json.dumps({**whole, table: []}).encode()
        yield table, "*", json.dumps({**whole, table: [row, row]}).encode()


@pytest.mark.slow
async def test_a_damaged_line_is_refused_or_can_be_read(filled: SqliteLightningStore, tmp_path: Path) -> None:
    """Whatever is let in breaks no query, holds up no claim and no watchdog."""
    line = [line async for line in filled.export_lines()][-1]
    other = SqliteLightningStore(tmp_path / "other.db", watchdog_seconds=0.02)
    for table, name, spoiled in _spoiled(line):
        try:
            assert await other.import_lines([spoiled]) == 1
        except StoreError:
            continue
        what = f"{table}.{name}"
        for rollout in await other.query_rollouts(limit=-1):
            assert await other.get_rollout_by_id(rollout.rollout_id) is not None, what
            assert len(await other.query_attempts(rollout.rollout_id)) <= 1, what
            assert len(await other.query_spans(rollout.rollout_id)) <= 2, what
            assert len((await other.query_calls([rollout.rollout_id]))[rollout.rollout_id]) <= 1, what
        assert await other.dequeue_rollout("w") is None, what
        assert await other.prune(keep=0) == 1, what
        assert not any((await other.statistics())["rollouts"].values()), what
    late = await other.start_rollout(1, config=RolloutConfig(timeout_seconds=0.05))
    assert await other.wait_for_rollouts(rollout_ids=[late.rollout_id], timeout=5), "the watchdog is alive"
    await other.close()


async def test_segments_that_go_round_in_a_circle_are_refused(filled: SqliteLightningStore, tmp_path: Path) -> None:
    parts = json.loads(await anext(aiter(filled.export_lines())))
    first, second = parts["segments"]
    first |= {"parent_id": second["segment_id"], "parent_keep": 1}
    with pytest.raises(StoreError, match="damaged"):
        await filled.import_lines([json.dumps({**parts, "rollout": {**parts["rollout"]}}).encode()])


async def test_another_rollouts_attempt_is_not_taken_over(filled: SqliteLightningStore) -> None:
    text = (await anext(aiter(filled.export_lines()))).decode().replace('"r0"', '"another"')
    before = await filled.statistics()
    with pytest.raises(ConflictError, match="in another rollout"):
        await filled.import_lines([text.encode()])
    after = await filled.statistics()
    assert (after["rollouts"], after["attempts"]) == (before["rollouts"], before["attempts"])


@pytest.mark.slow
async def test_damaged_parquet_is_refused_by_name(filled: SqliteLightningStore, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from agentlightning.store.transfer.parquet import read_folder, write_folder

    await write_folder(filled.export_records(), tmp_path / "whole")
    random, refused = Random(0), 0
    for number in range(40):
        folder = tmp_path / f"damaged-{number}"
        shutil.copytree(tmp_path / "whole", folder)
        file = random.choice(sorted(folder.iterdir()))
        data = bytearray(file.read_bytes())
        data[random.randrange(len(data))] ^= 255
        file.write_bytes(data if number % 3 else data[: random.randrange(len(data))])
        other = SqliteLightningStore(tmp_path / f"{number}.db")
        try:
            count = await other.import_records(read_folder(folder))
        except StoreError:
            refused += 1
        else:  # the damage was in something that nobody reads
            assert count == 5
            assert [r async for r in other.export_records()] == [r async for r in filled.export_records()]
        await other.close()
    assert refused > 30


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


async def test_recordings_go_with_their_last_fork(filled: SqliteLightningStore) -> None:
    recording = RecordedAttempt(rollout_id="r0", calls=[])
    for name, given in (("kept", recording), ("gone", recording), ("plain", Resource())):
        await filled.add_resources({"x": given}, resources_id=name)
        for number in range(2):
            claim = await filled.start_rollout(1, resources_id=name, rollout_id=f"{name}{number}")
            if (name, number) != ("kept", 1):
                await filled.update_attempt(claim.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)
    await filled.add_resources({"x": recording}, resources_id="newest")
    assert await filled.prune(keep=0) == 10
    there = [await filled.get_resources_by_id(name) for name in ("kept", "gone", "plain", "newest")]
    assert [one is not None for one in there] == [True, False, True, True]
