"""What calls of several attempts have in common: stored once, and read whole, whatever is deleted."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command

from agentlightning.errors import ConflictError, StoreError
from agentlightning.store import LightningStore, PostgresLightningStore, SqliteLightningStore
from agentlightning.store.database.migrate import alembic_config
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import AttemptedRollout, AttemptStatus, Call, CallRecord
from agentlightning.types.call import SegmentSource, SpanSource
from tests.store.builders import make_call, make_segment

PROMPT = list(range(1000, 1600))
SAID = {"gen_ai.input.messages": '[{"role":"user","parts":["What is 2 + 3?"]}]', "gen_ai.output.messages": "[5]"}
Measure = Callable[[], tuple[int, int]]
"""How many bytes the tokens and log-probs of all segments have, and how many spans hold the question."""
_BYTES = "SELECT SUM(length(ids) + COALESCE(length(logprobs), 0) + COALESCE(length(plain_logprobs), 0)) FROM segments"
_SPANS = "SELECT COUNT(*) FROM spans WHERE attributes || COALESCE(texts, '') LIKE '%What is 2 + 3?%'"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.contract)])
async def measured(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[SqlLightningStore, Measure]]:
    if request.param == "sqlite":
        store: SqlLightningStore = SqliteLightningStore(tmp_path / "store.db")
        database: Any = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    else:
        psycopg: Any = pytest.importorskip("psycopg")
        dsn = request.getfixturevalue("postgres_dsn")
        store, database = PostgresLightningStore(dsn), psycopg.connect(dsn, autocommit=True)

    def measure() -> tuple[int, int]:
        size, spans = (int(database.execute(text).fetchall()[0][0] or 0) for text in (_BYTES, _SPANS))
        return size, spans

    with closing(database):
        yield store, measure
    await store.close()


def turn(claim: AttemptedRollout, of: AttemptedRollout | None = None, ids: list[int] = PROMPT) -> CallRecord:
    """A call of two segments, as one of another attempt has them, or with none to have them from."""
    name = claim.attempt.attempt_id
    segments = [
        make_segment(f"{name}/p", None, 0, ids),
        make_segment(f"{name}/r", f"{name}/p", len(ids), [7, 8, 9], 4),
    ]
    if of is not None:
        other = of.attempt.attempt_id
        names = [f"{other}/p", f"{other}/r"]
        segments = [replace(one, source=SegmentSource(other, name)) for one, name in zip(segments, names, strict=True)]
    call = make_call(claim, f"{name}:0", f"{name}/p", f"{name}/r", *segments)
    span = call.span.model_copy(update={"span_id": f"{name}-span", "attributes": {"a": 1, **SAID}})
    return replace(
        call, span=span, span_source=of and SpanSource(of.attempt.attempt_id, f"{of.attempt.attempt_id}-span")
    )


async def read(store: LightningStore, claim: AttemptedRollout) -> list[Call]:
    return list((await store.query_calls([claim.rollout_id]))[claim.rollout_id])


async def said(store: LightningStore, claim: AttemptedRollout) -> object:
    """The attributes of the attempt's first call."""
    return (await store.query_spans(claim.rollout_id, "latest")).items[0].attributes


def arrays(call: Call) -> tuple[Any, ...]:
    tokens = [getattr(call, n).tolist() for n in ("prompt_ids", "response_ids", "logprobs", "plain_logprobs")]
    return *tokens, call.versions


async def finish(store: LightningStore, *claims: AttemptedRollout) -> None:
    for claim in claims:
        await store.update_attempt(claim.rollout_id, "latest", status=AttemptStatus.SUCCEEDED)


@pytest.mark.contract
async def test_forks_read_the_tokens_of_what_they_are_of(store: LightningStore) -> None:
    """A fork of a fork, too; and what follows a segment without tokens of its own builds on them."""
    original, fork, second = [await store.start_rollout(n) for n in range(3)]
    await store.add_calls([turn(original)])
    (first,) = await read(store, original)
    assert first.prompt_segment_id == f"{original.attempt.attempt_id}/p"
    for claim, of in ((fork, original), (second, fork)):
        await store.add_calls([turn(claim, of)])
        await store.add_calls([turn(claim, of)])  # a repeated request
        name = claim.attempt.attempt_id
        after = make_segment("more", f"{name}/p", 599, [1]), make_segment("end", "more", 1, [2], 5)
        await store.add_calls([make_call(claim, "after", "more", "end", *after)])
        found = await read(store, claim)
        assert arrays(found[0]) == arrays(first)
        assert await said(store, claim) == {"a": 1, **SAID}
        assert found[1].prompt_ids.tolist() == [*PROMPT[:599], 1]
        beyond = make_segment("beyond", f"{name}/p", 601, [1])
        with pytest.raises(ConflictError, match="601 tokens of segment"):
            await store.add_calls([make_call(claim, "beyond", "beyond", "beyond", beyond)])
    (record, *_) = await store.query_records([second.rollout_id])
    assert arrays(record.calls[0]) == arrays(first)


async def test_the_tokens_are_stored_once(measured: tuple[SqlLightningStore, Measure]) -> None:
    store, stored = measured
    original, unknown = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    before = stored()
    assert before == (size := 4 * len(PROMPT) + 12 * 3, 1)
    last = original
    for number in range(20):
        fork = await store.start_rollout(number)
        await store.add_calls([turn(fork, original if number % 2 else last)])
        last = fork
    assert stored() == before
    for number in range(5):  # of an attempt that another store has
        await store.add_calls([turn(await store.start_rollout(number), unknown, [*PROMPT, 3])])
    assert stored() == (2 * size + 4, 2)


async def test_only_the_same_tokens_are_left_out(measured: tuple[SqlLightningStore, Measure]) -> None:
    """Nobody reads the tokens of another attempt by naming its segments."""
    store, stored = measured
    original, fork = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    size, spans = stored()
    await store.add_calls([turn(fork, original, [5, *PROMPT[1:]])])
    (call,) = await read(store, fork)
    assert call.prompt_ids.tolist() == [5, *PROMPT[1:]]
    assert stored() == (size + 4 * len(PROMPT), spans), "its response and its messages are the same"
    other = turn(thinks := await store.start_rollout(4), original)
    attributes = {**SAID, "gen_ai.output.messages": "[6]"}
    await store.add_calls([replace(other, span=other.span.model_copy(update={"attributes": attributes}))])
    assert await said(store, thinks) == attributes
    itself = await store.start_rollout(3)
    name = itself.attempt.attempt_id
    await store.add_calls([turn(itself, itself)])
    assert arrays((await read(store, itself))[0]) == arrays((await read(store, original))[0])
    empty = make_segment("none", f"{name}/r", 3, [])
    named = replace(empty, source=SegmentSource(original.attempt.attempt_id, f"{original.attempt.attempt_id}/p"))
    await store.add_calls([make_call(itself, "none", f"{name}/r", "none", named)])
    assert (await read(store, itself))[1].response_ids.tolist() == []


async def test_an_agents_span_in_the_place_of_a_calls_is_no_source(store: LightningStore) -> None:
    """An agent may report a span with the id of a call's before that is stored, which forks would read from."""
    unknown, first, second = [await store.start_rollout(n) for n in range(3)]
    calls = [turn(first, unknown), turn(second, unknown)]
    await store.add_span(calls[0].span.model_copy(update={"attributes": {"agent": "was here"}}))
    await store.add_calls(calls)
    assert await said(store, first) == {"agent": "was here"}
    assert await said(store, second) == {"a": 1, **SAID}


async def test_forks_outlive_what_they_are_of(measured: tuple[SqlLightningStore, Measure]) -> None:
    store, stored = measured
    claims = [await store.start_rollout(n) for n in range(4)]
    original, first, second, third = claims
    await store.add_calls([turn(original)])
    (before,), size = await read(store, original), stored()
    await store.add_calls([turn(first, original), turn(third, original)])
    await store.add_calls([turn(second, first)])
    assert stored() == size
    await finish(store, *claims)
    for left in (claims[1:], claims[2:], claims[3:], []):
        assert await store.prune(keep=len(left)) == 1
        assert stored() == (size if left else (0, 0)), "all stays with one of them"
        for claim in left:
            assert await said(store, claim) == {"a": 1, **SAID}
            assert arrays((await read(store, claim))[0]) == arrays(before)


async def test_forks_of_what_was_never_here_outlive_each_other(measured: tuple[SqlLightningStore, Measure]) -> None:
    store, stored = measured
    unknown, *claims = [await store.start_rollout(n) for n in range(4)]
    await store.add_calls([turn(claim, unknown) for claim in claims])
    size, (before, *_) = stored(), await read(store, claims[0])
    await finish(store, unknown, *claims)
    for left in (3, 2, 1):
        await store.prune(keep=left)
        assert stored() == size
        assert [arrays((await read(store, claim))[0]) for claim in claims[-left:]] == [arrays(before)] * left
        assert [await said(store, claim) for claim in claims[-left:]] == [{"a": 1, **SAID}] * left
    await store.add_calls([turn(late := await store.start_rollout(9), unknown)])
    assert (stored(), arrays((await read(store, late))[0])) == (size, arrays(before))


@pytest.mark.contract
async def test_who_deletes_waits_for_forks_that_are_being_stored(postgres_dsn: str) -> None:
    """Another store has looked at the original's rows, and not yet committed that others read from them."""
    psycopg: Any = pytest.importorskip("psycopg")
    store = PostgresLightningStore(postgres_dsn)
    original, fork = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    await finish(store, original)
    name, mine = original.attempt.attempt_id, fork.attempt.attempt_id
    with closing(psycopg.connect(postgres_dsn)) as other:
        other.execute("SELECT 1 FROM segments WHERE attempt_id = %s FOR KEY SHARE", [name])
        other.execute(
            "INSERT INTO segments (attempt_id, segment_id, parent_keep, ids, source_attempt, source_segment) "
            "VALUES (%s, 'p', 0, '', %s, %s)",
            [mine, name, f"{name}/p"],
        )
        deleting = asyncio.create_task(store.prune(keep=0))
        assert not (await asyncio.wait([deleting], timeout=0.3))[0]
        other.commit()
        assert await deleting == 1
        found = other.execute("SELECT length(ids) FROM segments").fetchall()
    assert found == [(4 * len(PROMPT),)]
    await store.close()


@pytest.mark.contract
async def test_who_stores_a_fork_waits_for_its_original_to_be_deleted(postgres_dsn: str) -> None:
    psycopg: Any = pytest.importorskip("psycopg")
    store = PostgresLightningStore(postgres_dsn)
    original, fork = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    (before,) = await read(store, original)
    with closing(psycopg.connect(postgres_dsn)) as other:
        for table in ("spans", "segments"):
            other.execute(f"DELETE FROM {table} WHERE attempt_id = %s", [original.attempt.attempt_id])
        adding = asyncio.create_task(store.add_calls([turn(fork, original)]))
        assert not (await asyncio.wait([adding], timeout=0.3))[0]
        other.commit()
        await adding
    assert arrays((await read(store, fork))[0]) == arrays(before)
    assert await said(store, fork) == {"a": 1, **SAID}
    await store.close()


async def test_what_is_exported_has_its_tokens(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    original, fork = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    await store.add_calls([turn(fork, original)])
    await finish(store, original, fork)
    (before,) = await read(store, original)
    lines = [line async for line in store.export_lines()]
    await store.close()
    for name, chosen in (("both", lines), ("fork", lines[1:])):
        other = SqliteLightningStore(tmp_path / f"{name}.db")
        assert await other.import_lines(chosen) == len(chosen)
        assert arrays((await read(other, fork))[0]) == arrays(before)
        assert await said(other, fork) == {"a": 1, **SAID}
        assert [line async for line in other.export_lines()] == chosen
        await other.close()


async def test_a_folder_of_parquet_has_them_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from agentlightning.store.transfer.parquet import read_folder, write_folder

    store, other = SqliteLightningStore(tmp_path / "store.db"), SqliteLightningStore(tmp_path / "other.db")
    original, fork = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    await store.add_calls([turn(fork, original)])
    await finish(store, fork)
    assert await write_folder(store.export_records(), tmp_path / "folder") == 1
    assert await other.import_records(read_folder(tmp_path / "folder")) == 1
    assert arrays((await read(other, fork))[0]) == arrays((await read(store, original))[0])
    assert await said(other, fork) == {"a": 1, **SAID}
    await store.close()
    await other.close()


async def test_a_missing_source_is_named(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    original, fork = await store.start_rollout(1), await store.start_rollout(2)
    await store.add_calls([turn(original)])
    await store.add_calls([turn(fork, original)])
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as database:
        for table in ("segments", "spans"):
            database.execute(f"DELETE FROM {table} WHERE attempt_id = ?", [original.attempt.attempt_id])
    for asked in (read, said):
        with pytest.raises(StoreError, match=f"attempt '{original.attempt.attempt_id}', which is missing in the store"):
            await asked(store, fork)
    await store.close()


async def test_an_older_version_gets_every_token_back(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    unknown, original, fork, later = [await store.start_rollout(n) for n in range(4)]
    await store.add_calls([turn(original), turn(later, unknown)])
    await store.add_calls([turn(fork, original)])
    await store.add_calls([turn(last := await store.start_rollout(4), unknown)])
    wanted = [arrays((await read(store, claim))[0]) for claim in (fork, last)]
    await store.close()
    command.downgrade(alembic_config(f"sqlite:///{tmp_path / 'store.db'}"), "0005")
    store = SqliteLightningStore(tmp_path / "store.db")
    assert [arrays((await read(store, claim))[0]) for claim in (fork, last)] == wanted
    assert [await said(store, claim) for claim in (fork, later, last)] == [{"a": 1, **SAID}] * 3
    await store.close()


async def test_deleting_looks_up_by_index_who_has_tokens_from_it(tmp_path: Path) -> None:
    await SqliteLightningStore(tmp_path / "store.db").close()
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        for where in ("source_attempt IS NOT NULL LIMIT 1", "source_attempt IN ('a', 'b') AND attempt_id NOT IN ('a')"):
            for table in ("segments", "spans"):
                plan = database.execute(f"EXPLAIN QUERY PLAN SELECT seq FROM {table} WHERE {where}").fetchall()
                assert f"{table}_source" in str(plan)
