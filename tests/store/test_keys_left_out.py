"""An agent that prints its key: no field of a store keeps it whole, and none of an older store's is handed on."""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.keys import CALLS, redacted, redacted_pieces, sign_attempt_key, sign_url_key
from agentlightning.store import InMemoryLightningStore, LightningStore, SqliteLightningStore
from agentlightning.types import AttemptedRollout, AttemptStatus, Outcome, Run, RunEvent, RunStatus
from agentlightning.types.call import Divergence
from agentlightning.types.span import Event, SpanStatus
from tests.store.builders import make_call, make_segment, make_span

SECRET = b"s" * 32
KEY = sign_attempt_key(SECRET, "ro-1", "at-1")
URL = f"http://127.0.0.1:1/rollout/ro-1/attempt/at-1/key/{sign_url_key(SECRET, 'ro-1', 'at-1', (CALLS,))}/v1"
SIGNATURES = (KEY[4:36], URL.partition("/key/c-")[2][:32])
SAID = f"My key is {KEY}\nat {URL}, {json.dumps(URL).replace('/', chr(92) + '/')}, {URL.replace('/', '%2F')}"


def whole(text: str) -> list[str]:
    return [signature for signature in SIGNATURES if signature in text]


async def fill(store: LightningStore) -> None:
    """Write what an agent said into every field that takes text of somebody else's."""
    await store.begin_run(Run(run_id="run", algorithm="GRPO", agent="agent", settings={"note": SAID}))
    await store.add_run_events([RunEvent(run_id="run", event_id="e", kind="step", time=1.0, step=1, data={"t": SAID})])
    await store.update_run("run", status=RunStatus.FAILED, state={"at": SAID}, error=SAID)
    await store.add_resources({"prompt": agl.PromptTemplate(template=SAID, engine="f-string")}, "res")
    await store.update_worker("w", heartbeat_stats={"doing": SAID})
    for rollout_id, status in (("a", AttemptStatus.SUCCEEDED), ("b", AttemptStatus.FAILED)):
        claim = await store.start_rollout(
            {"q": [SAID]}, metadata={"m": SAID}, worker_id="w", rollout_id=rollout_id, attempt_id=f"at-{rollout_id}"
        )
        await store.add_calls([spoken(claim)])
        span = make_span(claim, SAID, text=SAID, parts=[SAID], reward=json.dumps({"why": SAID}))
        events = [Event(name=SAID, attributes={"exception.message": SAID}, timestamp=1.0)]
        status_of = SpanStatus(status_code="ERROR", description=SAID)
        await store.add_span(span.model_copy(update={"events": events, "status": status_of}))
        at = (claim.rollout_id, claim.attempt.attempt_id)
        await store.update_attempt(*at, metadata={"note": SAID})
        await store.update_attempt(*at, status=status, outcome=Outcome.AGENT_ERROR, error=SAID)


def spoken(claim: AttemptedRollout) -> Any:
    call = make_call(claim, "call", "p", "r", make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, [3], 1))
    told = {"model": SAID, "agent": SAID, "error": SAID, "asked": {"stop": [SAID]}, "used": {"user": SAID}}
    info = dataclasses.replace(call.info, **told, divergence=Divergence(0, 0, SAID))
    messages = json.dumps([{"role": "tool", "parts": [{"type": "tool_call_response", "response": SAID}]}])
    return dataclasses.replace(call, info=info, span=make_span(claim, "chat", **{"gen_ai.input.messages": messages}))


async def answers(store: LightningStore) -> Any:
    """All that a store tells."""
    ids = ["a", "b"]
    calls = await store.query_calls(ids)
    return [
        await store.query_rollouts(),
        [await store.query_attempts(i) for i in ids],
        [await store.query_spans(i) for i in ids],
        [call.info for found in calls.values() for call in found],
        await store.query_runs(),
        await store.query_run_events("run"),
        await store.query_resources(),
        await store.query_workers(),
        await store.query_records(ids),
    ]


@pytest.mark.contract
async def test_no_field_of_a_store_keeps_a_key(store: LightningStore) -> None:
    await fill(store)
    told = repr(await answers(store))
    assert whole(told) == []
    assert told.count("My key is agl-") > 20, "all of it is there but for the keys"
    (call, *_) = (await store.query_calls(["a"]))["a"]
    assert [*call.prompt_ids, *call.response_ids] == [1, 2, 3]


async def test_no_column_of_the_file_keeps_a_key(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    await fill(store)
    await store.close()
    assert [place for place, text in cells(tmp_path / "store.db") if whole(text)] == []
    assert sum("My key is agl-" in text for _, text in cells(tmp_path / "store.db")) > 10


def cells(path: Path) -> Iterator[tuple[str, str]]:
    with sqlite3.connect(path) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            found = database.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in found.description]
            for row in found.fetchall():
                yield from ((f"{table}.{name}", str(value)) for name, value in zip(names, row, strict=True))


def with_keys(path: Path) -> int:
    """Make the file one of an older version, which kept keys; returns in how many texts they are."""
    count = 0
    with sqlite3.connect(path) as database:
        for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type='table'").fetchall():
            for name, kind in [row[1:3] for row in database.execute(f"PRAGMA table_info({table})").fetchall()]:
                if kind in ("TEXT", "VARCHAR"):
                    short = re.escape(redacted(KEY))
                    for number, text in database.execute(f"SELECT rowid, {name} FROM {table}").fetchall():
                        if re.search(short, text or ""):
                            older = re.sub(short, KEY, text)
                            database.execute(f"UPDATE {table} SET {name} = ? WHERE rowid = ?", (older, number))
                            count += 1
    return count


async def test_the_keys_in_a_store_of_an_older_version_are_not_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = SqliteLightningStore(path)
    await fill(store)
    await store.close()
    assert with_keys(path) > 10
    older = SqliteLightningStore(path)
    assert whole(repr(await answers(older))) == []
    lines = [line async for line in older.export_lines()]
    assert len(lines) == 2
    assert whole(b"".join(lines).decode()) == []
    await older.close()

    dirty = [line.decode().replace(redacted(KEY), KEY).encode() for line in lines]
    assert whole(b"".join(dirty).decode()) != []
    new = InMemoryLightningStore()
    assert await new.import_lines(dirty) == 2
    assert whole(repr(await answers(new))) == []
    await new.close()


@pytest.mark.parametrize("cut", [36, 40, 60, len(KEY)])
def test_a_key_that_was_cut_is_hidden_while_its_signature_is_whole(cut: int) -> None:
    assert whole(redacted(f"x{KEY[:cut]} y")) == []


def test_what_only_looks_like_a_key_stays() -> None:
    names = (
        "agl-at-018f3c2b7a9d1e2f3a4b5c6d7e8f9a0b-grader",
        "https://example.com/key/some-words-of-a-page-that-has-a-long-title",
        "agl-gateway-experiment in /key/abc",
    )
    assert [redacted(name) for name in names] == list(names)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_text_in_pieces_is_hidden_across_them(length: int) -> None:
    text = f"before {KEY} and {URL} after"
    pieces = [text[at : at + length] for at in range(0, len(text), length)]
    shown = redacted_pieces(pieces)
    assert len(shown) == len(pieces)
    assert "".join(shown) == redacted(text)
    assert redacted_pieces(["a", "b"]) == ["a", "b"]


def test_signatures_have_capitals() -> None:
    """What tells a key from a name holds for as good as every key."""
    keys = [sign_attempt_key(SECRET, "ro-1", f"at-{n}") for n in range(5000)]
    assert [key for key in keys if whole_in(key, redacted(key))] == []


def whole_in(key: str, text: str) -> bool:
    return key[4:36] in text


def test_a_column_is_read_with_its_type() -> None:
    from agentlightning.store.operations.codec import decode

    assert decode("[1, 2]", "calls.info", "r", type=list[int]) == [1, 2]
    with pytest.raises(StoreError, match="damaged"):
        decode('["a"]', "calls.info", "r", type=list[int])
