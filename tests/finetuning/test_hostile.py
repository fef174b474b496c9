"""Whatever is sent to a route, it is answered, in the API's shape, and never by a fault of the server."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from agentlightning.finetuning import routes
from agentlightning.finetuning.routes import ROUTES

from .conftest import Serve

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
    b'{"grader":null}',
    b'{"grader":{"type":"multi","graders":{"a":1},"calculate_output":"a"},"model_sample":"a"}',
    b'{"grader":{"type":"python","name":"x","source":"\\ud800"},"model_sample":"a"}',
]
QUERIES = [
    "limit=x",
    "limit=-1",
    "limit=99999999999999999999",
    "after=%00",
    "after=%ff",
    "metadata[a'b]=c",
    "order=%00",
]
IDS = ["x", "%00", "%ff", "..%2f..%2frecords.db", "ft:calc:::x:ckpt-step-99999999999999999999"]


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
            for query in QUERIES if route.method == "GET" else ():
                assert await answered(session, "GET", f"{server.endpoint}{min(paths)}?{query}") < 500, (paths, query)


async def test_a_fault_of_the_server_is_said_to_be_one(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(routes, "listed", fails)
    async with serve() as (server, _), aiohttp.ClientSession() as session:
        assert await answered(session, "GET", f"{server.endpoint}/models") == 500
        assert await answered(session, "GET", f"{server.endpoint}/files") == 200
