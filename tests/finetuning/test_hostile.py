"""Whatever is sent to a route, it is answered, in the API's shape, and never by a fault of the server."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest

from agentlightning.finetuning import lines, routes
from agentlightning.finetuning.jobs import Quotas
from agentlightning.finetuning.lines import LineError, Lines
from agentlightning.finetuning.records import Records
from agentlightning.finetuning.routes import ROUTES
from agentlightning.finetuning.wire import unwritable
from agentlightning.net.server import ConnectionLimits

from .conftest import Serve, chats, polled, until, upload

LONG = b"9" * 5000
"""A number of more digits than `int` reads."""
BODIES: list[bytes] = [
    *(b"", b"[", b"null", b"[1]", b"\xff\xfe", b'{"a":' * 5000),
    *(b'{"name":5}', b'{"name":"\\ud800"}', b'{"name":"\\u0000"}'),
    *(b'{"part_ids":[["a"]]}', b'{"part_ids":[{}]}', b'{"part_ids":[1]}', b'{"part_ids":"a"}'),
    b'{"purpose":"fine-tune","bytes":true,"filename":"a"}',
    b'{"purpose":"fine-tune","bytes":10,"filename":"\\ud800"}',
    b'{"purpose":"fine-tune","bytes":10,"filename":"a","expires_after":[]}',
    b'{"purpose":"fine-tune","bytes":10,"filename":"a","expires_after":{"anchor":"created_at","seconds":"x"}}',
    b'{"model":"\\ud800","training_file":"x"}',
    b'{"model":1e999,"training_file":2}',
    b'{"model":"calc","training_file":["x"]}',
    b'{"model":"calc","training_file":"x","seed":99999999999999999999999}',
    b'{"model":"calc","training_file":"x","suffix":"../../x"}',
    b'{"model":"calc","training_file":"x","metadata":{"\\u0000":"\\u0000"}}',
    b'{"purpose":"fine-tune","bytes":10,"filename":"a","expires_after":{"anchor":"created_at","seconds":"\xc2\xb2"}}',
    b'{"grader":{"type":"string_check","name":"x","operation":"eq","input":"{{ item[%s] }}","reference":"a"}}' % LONG,
    b'{"model":"ft:a:b:c:%s","training_file":"x"}' % (b"%" * 60_000),
    b'{"grader":null}',
    b'{"grader":{"type":"multi","graders":{"a":1},"calculate_output":"a"},"model_sample":"a"}',
    b'{"grader":{"type":"python","name":"x","source":"\\ud800"},"model_sample":"a"}',
]
QUERIES = [
    "limit=x",
    "limit=-1",
    "limit=%C2%B2",
    f"limit={LONG.decode()}",
    "limit=99999999999999999999",
    "after=%00",
    "after=%ff",
    "metadata[a'b]=c",
    "order=%00",
]
IDS = [
    "x",
    "%00",
    "%ff",
    "..%2f..%2frecords.db",
    "ft:calc:::x:ckpt-step-99999999999999999999",
    "ft:calc:::x:ckpt-step-%C2%B2",
]
FORMS = ["", "x", f"x{'y' * 300}", "%00"]
"""Boundaries."""


async def answered(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> int:
    """The status of an answer; every refusal says in the API's shape why."""
    async with session.request(method, url, **options) as answer:
        found = await answer.read()
        assert answer.status < 400 or json.loads(found)["error"]["message"], (url, found)
        return answer.status


async def test_no_route_fails_by_what_is_sent(serve: Serve) -> None:
    async with serve() as (server, _), aiohttp.ClientSession() as session:
        form = {"purpose": "fine-tune", "bytes": 10, "filename": "a"}
        async with session.post(f"{server.endpoint}/uploads", json=form) as answer:
            upload = (await answer.json())["id"]
        for route in ROUTES:
            paths = {route.path.replace("{id:path}", "{id}").replace("{id}", one) for one in [*IDS, upload]}
            for path in paths:
                for body in BODIES if route.method == "POST" else [b""]:
                    headers = {"content-type": "application/json"}
                    url = f"{server.endpoint}{path}"
                    assert await answered(session, route.method, url, data=body, headers=headers) < 500, (path, body)
                for boundary in FORMS if route.method == "POST" else ():
                    headers = {"content-type": f"multipart/form-data; boundary={boundary}", "authorization": "Bearer x"}
                    url = f"{server.endpoint}{path}"
                    assert await answered(session, route.method, url, data=b"--x--", headers=headers) < 500, path
            for query in QUERIES if route.method == "GET" else ():
                assert await answered(session, "GET", f"{server.endpoint}{min(paths)}?{query}") < 500, (paths, query)


async def test_uploads_take_no_more_than_what_a_key_may_store(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by uploads that were begun while there was room, nor by a part that is named many times, nor by many."""
    async with serve(quotas=Quotas(file_bytes=1000, stored_bytes=2000)) as (server, client):
        begun = [
            (await client.uploads.create(bytes=1000, filename="f", mime_type="a", purpose="fine-tune")).id
            for _ in range(3)
        ]
        parts = [(await client.uploads.parts.create(one, data=b"%d" % i * 10)).id for i, one in enumerate(begun)]
        for one, part in zip(begun[:1], parts[:1], strict=True):
            await client.uploads.complete(one, part_ids=[part] * 100)
        with pytest.raises(openai.RateLimitError, match="stored_bytes"):
            await client.uploads.complete(begun[1], part_ids=[parts[1]] * 100)
        assert server.files.stored_bytes("admin") <= 2000
        monkeypatch.setattr(routes, "_MOST_PENDING", 2)
        with pytest.raises(openai.RateLimitError, match="2 uploads already"):
            await client.uploads.create(bytes=1, filename="f", mime_type="a", purpose="fine-tune")
        await client.uploads.parts.create(begun[1], data=b"x")
        with pytest.raises(openai.RateLimitError, match="2 parts already"):
            await client.uploads.parts.create(begun[1], data=b"")


async def test_what_is_kept_of_an_upload_is_what_it_needs(serve: Serve) -> None:
    async with serve() as (server, client):
        made = await client.uploads.create(
            bytes=1, filename="f" * 5000, mime_type="m" * 5000, purpose="fine-tune", extra_body={"more": "x" * 5000}
        )
        row = server.records.row("SELECT body FROM uploads WHERE id = ?", made.id)
        assert row is not None
        assert len(row["body"]) < 400


async def test_a_key_has_so_many_records_of_each_kind_also_of_what_is_over(serve: Serve) -> None:
    async with serve(quotas=Quotas(records=2)) as (server, client):
        for _ in range(2):
            begun = await client.uploads.create(bytes=1, filename="f", mime_type="text/plain", purpose="fine-tune")
            await client.uploads.cancel(begun.id)
        with pytest.raises(openai.RateLimitError, match=r"2 uploads on record.*records=NUMBER"):
            await client.uploads.create(bytes=1, filename="f", mime_type="text/plain", purpose="fine-tune")
        files = [await upload(client, chats()) for _ in range(2)]
        with pytest.raises(openai.RateLimitError, match="2 files on record"):
            await upload(client, chats())
        for _ in range(2):
            job = (await client.fine_tuning.jobs.create(model="calc", training_file=files[0])).id
            await client.fine_tuning.jobs.cancel(job)
        with pytest.raises(openai.RateLimitError, match="2 jobs on record"):
            await client.fine_tuning.jobs.create(model="calc", training_file=files[0])
        assert len(server.records.rows("SELECT id FROM jobs")) == 2
        await client.files.delete(files[1])
        await upload(client, chats())


async def test_a_job_ends_with_its_results_whatever_its_key_may_have(serve: Serve) -> None:
    async with serve(quotas=Quotas(records=1)) as (_, client):
        job = (await client.fine_tuning.jobs.create(model="calc", training_file=await upload(client, chats()))).id
        done = await until(client, job)
        assert (done.status, len(done.result_files)) == ("succeeded", 1)


async def test_content_that_gets_no_row_is_not_left_on_the_disk(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would count it, so a key could fill the disk with files that are refused."""
    async with serve() as (server, client):
        begun = await client.uploads.create(bytes=2, filename="f", mime_type="text/plain", purpose="fine-tune")
        parts = [(await client.uploads.parts.create(begun.id, data=data)).id for data in (b"a", b"b")]
        kept = contents(tmp_path)
        assert len(kept) == 2
        add = server.records.add

        def full(table: str, **values: Any) -> None:
            if table in ("files", "parts"):
                raise sqlite3.OperationalError("database or disk is full")
            add(table, **values)

        monkeypatch.setattr(server.records, "add", full)
        once = client.with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError):
            await upload(once, chats())
        with pytest.raises(openai.InternalServerError):
            await once.uploads.parts.create(begun.id, data=b"")
        with pytest.raises(openai.InternalServerError):
            await once.uploads.complete(begun.id, part_ids=parts, md5=hashlib.md5(b"ab").hexdigest())
        assert contents(tmp_path) == kept


async def two_parts(client: openai.AsyncOpenAI) -> tuple[str, list[str]]:
    begun = await client.uploads.create(bytes=2, filename="f", mime_type="text/plain", purpose="fine-tune")
    return begun.id, [(await client.uploads.parts.create(begun.id, data=data)).id for data in (b"a", b"b")]


async def test_a_content_that_comes_again_while_it_is_deleted_stays(serve: Serve) -> None:
    async with serve() as (server, client), httpx.AsyncClient(base_url=server.endpoint) as http:
        first = await client.files.create(file=("a.jsonl", b"x" * 100), purpose="fine-tune")
        deleted = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b\r\n'
            yield b'Content-Disposition: form-data; name="file"; filename="b.jsonl"\r\n\r\n' + b"x" * 60
            await deleted.wait()
            yield b"x" * 40 + b"\r\n--b--\r\n"

        kind = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": f"Bearer {client.api_key}"}
        sending = asyncio.create_task(http.post("/files", content=body(), headers=kind))
        while not server.blobs.arriving:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await client.files.delete(first.id)
        deleted.set()
        second = (await sending).json()["id"]
        third = await client.files.create(file=("c.jsonl", b"x" * 100), purpose="fine-tune")
        await client.files.delete(third.id)
        assert (await client.files.content(second)).content == b"x" * 100


async def test_an_upload_that_is_cancelled_while_it_is_joined_is_refused(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as (server, client):
        upload, parts = await two_parts(client)
        path, copying, cancelled = server.blobs.path, threading.Event(), threading.Event()

        def when_cancelled(sha256: str) -> Path:
            if threading.current_thread() is not threading.main_thread():
                copying.set()
                assert cancelled.wait(20)
            return path(sha256)

        monkeypatch.setattr(server.blobs, "path", when_cancelled)
        once = client.with_options(max_retries=0)
        completing = asyncio.create_task(once.uploads.complete(upload, part_ids=parts))
        assert await asyncio.to_thread(copying.wait, 20)
        await client.uploads.cancel(upload)
        cancelled.set()
        with pytest.raises(openai.BadRequestError, match="cancelled"):
            await completing
        assert contents(tmp_path) == set()


async def test_parts_whose_upload_is_not_committed_keep_their_contents(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as (server, client):
        upload, parts = await two_parts(client)
        transaction = server.records.transaction

        @contextmanager
        def full() -> Iterator[None]:
            outermost = not server.records._connection.in_transaction
            with transaction():
                yield
                if outermost:
                    raise sqlite3.OperationalError("database or disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(server.records, "transaction", full)
            with pytest.raises(openai.InternalServerError):
                await client.with_options(max_retries=0).uploads.complete(upload, part_ids=parts)
        done = await client.uploads.complete(upload, part_ids=parts)
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == b"ab"


def contents(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("files/*")}


async def test_a_full_disk_is_said_to_be_one(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost, and once there is room all goes on."""
    async with serve() as (server, _), aiohttp.ClientSession() as session:
        connection = server.records._connection
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count={pages}")
        body = {"purpose": "fine-tune", "bytes": 1, "filename": "a" * 250}
        statuses = [(await session.post(f"{server.endpoint}/uploads", json=body)).status for _ in range(60)]
        assert {*statuses} == {200, 507}
        assert "cannot write: database or disk is full" in caplog.text
        assert "Traceback" not in caplog.text
        assert (await session.get(f"{server.endpoint}/files")).status == 200
        connection.execute("PRAGMA max_page_count=100000")
        assert (await session.post(f"{server.endpoint}/uploads", json=body)).status == 200
        rows = server.records.rows("SELECT id FROM uploads")
        assert len(rows) == statuses.count(200) + 1
    assert unwritable(OSError(errno.ENOSPC, "No space left on device"))
    assert not unwritable(OSError(errno.EBADF, "Bad file descriptor"))


def test_a_transaction_that_cannot_be_committed_is_over(tmp_path: Path) -> None:
    """What comes after it would else be part of it, and gone with it."""
    records = Records(tmp_path / "records.db")
    records.define(
        "CREATE TABLE p (id INTEGER PRIMARY KEY); CREATE TABLE c (p REFERENCES p DEFERRABLE INITIALLY DEFERRED)"
    )
    records._connection.execute("PRAGMA foreign_keys = ON")
    with pytest.raises(sqlite3.IntegrityError), records.transaction():
        records._connection.execute("INSERT INTO c VALUES (1)")
    with records.transaction():
        records._connection.execute("INSERT INTO p VALUES (7)")
    assert not records._connection.in_transaction
    assert (records.rows("SELECT * FROM p"), records.rows("SELECT * FROM c")) == ([{"id": 7}], [])
    records.close()


async def test_one_key_leaves_connections_to_others(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConnectionLimits, "of_one_key", 1)
    async with serve(key="admin", admin_key="admin") as (server, client), aiohttp.ClientSession() as session:
        made = await client.post("/organization/admin_api_keys", cast_to=httpx.Response, body={"name": "greedy"})
        greedy = {"authorization": f"Bearer {made.json()['value']}", "content-type": "application/json"}
        sending = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b"{"
            sending.set()
            await asyncio.Event().wait()

        url = f"{server.endpoint}/uploads"
        held = asyncio.ensure_future(session.post(url, data=slowly(), headers=greedy))
        await sending.wait()
        await polled(lambda: asyncio.sleep(0, len(server._busy._count)), bool)
        assert await answered(session, "GET", f"{server.endpoint}/files", headers=greedy) == 429
        tinker = url.replace("/v1/uploads", "/api/v1/sessions")
        async with session.get(tinker, headers={"x-api-key": f"tml-{made.json()['value']}"}) as answer:
            assert (answer.status, "per_key" in (await answer.json())["detail"]) == (429, True)
        assert [f async for f in client.files.list()] == []
        held.cancel()


async def test_a_fault_of_the_server_is_said_to_be_one(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(routes, "listed", fails)
    async with serve() as (server, _), aiohttp.ClientSession() as session:
        assert await answered(session, "GET", f"{server.endpoint}/models") == 500
        assert await answered(session, "GET", f"{server.endpoint}/files") == 200


def test_a_file_of_very_many_lines_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MOST_LINES", 3)
    (tmp_path / "f").write_bytes(b"{}\n" * 3)
    assert len(Lines(tmp_path / "f", "agent")) == 3
    (tmp_path / "f").write_bytes(b"{}\n" * 4)
    with pytest.raises(LineError, match="Line 4: the file has more than 3 lines"):
        Lines(tmp_path / "f", "agent")
