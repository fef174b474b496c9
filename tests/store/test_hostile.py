"""What an agent may send to the store's server, and what becomes of the rest: a 4xx, and nobody waits for it."""

from __future__ import annotations

import asyncio
import gzip
import io
import time
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.errors import ConfigError
from agentlightning.keys import SPANS
from agentlightning.serving import ConnectionLimits
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.store.http import size

SECRET = b"s" * 32
SPANS_PATH = "/v1/agl/spans"
JSON = {"Content-Type": "application/json"}
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
GZIPPED = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[LightningStoreServer]:
    store = SqliteLightningStore(tmp_path / "store.db")
    server = LightningStoreServer(store, port=0, admin_key="admin", secret=SECRET)
    await server.start()
    yield server
    await server.stop()
    await store.close()


@pytest.fixture
async def agent(server: LightningStoreServer) -> AsyncIterator[aiohttp.ClientSession]:
    """Holds the key of an attempt."""
    claim = await server.store.start_rollout("task")
    key = server.key_for(claim.rollout_id, claim.attempt.attempt_id, (SPANS,))
    async with aiohttp.ClientSession(server.endpoint, headers={"Authorization": f"Bearer {key}"}) as session:
        yield session


def many_empty_spans(count: int) -> bytes:
    export = ExportTraceServiceRequest()
    export.resource_spans.add().scope_spans.add()
    spans = b"\x12\x00" * count  # field 2 of a ScopeSpans, without a length
    scope = b"\x12" + _varint(len(spans)) + spans
    return b"\x0a" + _varint(len(scope)) + scope


def many_empty_attributes(count: int) -> bytes:
    span = b"\x4a\x00" * count
    spans = b"\x12" + _varint(len(span)) + span
    scope = b"\x12" + _varint(len(spans)) + spans
    return b"\x0a" + _varint(len(scope)) + scope


def _varint(value: int) -> bytes:
    parts = b""
    while value > 0x7F:
        parts, value = parts + bytes([value & 0x7F | 0x80]), value >> 7
    return parts + bytes([value])


def test_the_bombs_are_what_they_say() -> None:
    export = ExportTraceServiceRequest.FromString(many_empty_spans(3))
    assert len(export.resource_spans[0].scope_spans[0].spans) == 3
    export = ExportTraceServiceRequest.FromString(many_empty_attributes(300))
    assert len(export.resource_spans[0].scope_spans[0].spans[0].attributes) == 300


BOMBS = {
    "spans": (GZIPPED, gzip.compress(many_empty_spans(2_000_000))),
    "attributes": (GZIPPED, gzip.compress(many_empty_attributes(2_000_000))),
    "bytes": (GZIPPED, gzip.compress(bytes(2**27))),
    "json": ({"Content-Type": "application/json"}, b'{"a":[' + b"{}," * 2_000_000 + b"{}]}"),
}


@pytest.mark.parametrize("name", BOMBS)
async def test_an_otlp_bomb_is_too_large(agent: aiohttp.ClientSession, name: str) -> None:
    headers, body = BOMBS[name]
    async with agent.post("/v1/traces", data=io.BytesIO(body), headers=headers) as response:
        assert response.status == 413, await response.text()
        assert "send smaller batches" in await response.text()


@pytest.mark.parametrize("body", [b"[" + b"{}," * 300_000 + b"{}]", b"[" + b"{}," * size.MAX_SPANS + b"{}]"])
async def test_a_heap_of_spans_is_too_large(agent: aiohttp.ClientSession, body: bytes) -> None:
    async with agent.post("/v1/agl/spans", data=body) as response:
        assert response.status == 413, await response.text()


async def test_others_are_answered_while_a_large_export_is_decoded(
    server: LightningStoreServer, agent: aiohttp.ClientSession
) -> None:
    """At the limit: it is decoded, and the event loop has turns meanwhile."""
    headers, body = GZIPPED, gzip.compress(many_empty_attributes(size.MAX_FIELDS - 10))
    sending = asyncio.create_task(_post(agent, headers, body))
    turns = 0
    started = time.perf_counter()
    while not sending.done():
        await asyncio.sleep(0)
        turns += 1
        if time.perf_counter() - started > 120:
            break
    assert await sending in (200, 403)
    assert turns > 100  # decoded on the loop, there would be a handful


async def _post(session: aiohttp.ClientSession, headers: dict[str, str], body: bytes) -> int:
    async with session.post("/v1/traces", data=body, headers=headers) as response:
        return response.status


@pytest.mark.parametrize(
    "path",
    [
        "/v1/agl/rollouts",
        "/v1/agl/queues/rollouts/enqueue",
        "/v1/agl/spans",
        "/v1/agl/spans/search",
        "/v1/agl/attempts/update",
        "/v1/agl/runs",
        "/v1/agl/calls",
    ],
)
@pytest.mark.parametrize("body", [b'{"input": "\xff"}', b"\xff\xfe", b'[{"span_id": "\xc3("}]', b'{"a":' * 5000])
async def test_what_is_no_text_is_refused(server: LightningStoreServer, path: str, body: bytes) -> None:
    headers = {"Authorization": "Bearer admin", "Content-Type": "application/json"}
    session = aiohttp.ClientSession(server.endpoint, headers=headers)
    async with session, session.post(path, data=body) as response:
        assert 400 <= response.status < 500, await response.text()


@pytest.mark.parametrize("key", ["", "  "])
async def test_an_empty_key_is_not_a_key(tmp_path: Path, key: str) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    for host in ("0.0.0.0", "127.0.0.1"):
        with pytest.raises(ConfigError, match="empty"):
            LightningStoreServer(store, host, 0, admin_key=key)
    with pytest.raises(ConfigError, match="is not a key"):
        LightningStoreServer(store, port=0, admin_key="k", secret=b"")
    await store.close()


async def drip(server: LightningStoreServer, headers: dict[str, str], sent: bytes) -> Connection:
    """A request whose body has begun and does not go on."""
    parts = urlsplit(server.endpoint)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST {SPANS_PATH} HTTP/1.1\r\n{lines}content-length: 1000\r\n\r\n".encode() + sent)
    await writer.drain()
    return reader, writer


async def test_a_body_of_an_agents_must_come_in_time(
    server: LightningStoreServer, agent: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.http.access.BODY_SECONDS", 0.2)
    reader, writer = await drip(server, dict(agent.headers), b"[")
    assert b"408" in await reader.readuntil(b"\r\n")
    writer.close()


async def test_what_one_agent_sends_at_once_is_bounded(
    server: LightningStoreServer, agent: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.http.access.MAX_HELD_BYTES", 150)
    _, writer = await drip(server, dict(agent.headers), b"[" + b" " * 99)
    await asyncio.sleep(0.2)
    async with agent.post(SPANS_PATH, data=b"[" + b" " * 100 + b"]") as answer:
        assert (answer.status, "together" in await answer.text()) == (429, True)
    writer.close()
    await writer.wait_closed()
    async with agent.post(SPANS_PATH, data=b"[" + b" " * 100 + b"]", headers=JSON) as answer:
        assert answer.status == 200, await answer.text()


async def test_connections_are_left_to_others_and_to_the_admin(tmp_path: Path) -> None:
    store = SqliteLightningStore(tmp_path / "store.db")
    limits = ConnectionLimits(most=8, reserve=2, per_key=2)
    server = LightningStoreServer(store, port=0, admin_key="admin", secret=SECRET, connection_limits=limits)
    await server.start()
    claim = await store.start_rollout("task")
    key = server.key_for(claim.rollout_id, claim.attempt.attempt_id, (SPANS,))
    agents, admins = {"Authorization": f"Bearer {key}"}, {"Authorization": "Bearer admin"}
    dripping = [await drip(server, agents, b"[") for _ in range(2)]
    await asyncio.sleep(0.2)
    wait = {"rollout_ids": [claim.rollout_id], "timeout": 5}
    async with (
        aiohttp.ClientSession(server.endpoint, headers=agents) as agent,
        aiohttp.ClientSession(server.endpoint, headers=admins) as admin,
    ):
        async with agent.post(SPANS_PATH, json=[]) as answer:
            assert (answer.status, "per_key" in await answer.text()) == (429, True)
        waiting = [asyncio.create_task(admin.post("/v1/agl/waits/rollouts", json=wait)) for _ in range(6)]
        await asyncio.sleep(1.0)
        async with aiohttp.ClientSession(server.endpoint) as anybody:
            async with anybody.post(SPANS_PATH, json=[]) as answer:
                assert answer.status == 503
            async with anybody.get("/v1/agl/health") as answer:
                assert answer.status == 200
        async with admin.get("/v1/agl/statistics") as answer:
            assert answer.status == 200
        for answer in await asyncio.gather(*waiting):
            assert answer.status == 200
    for _, writer in dripping:
        writer.close()
    await server.stop()
    await store.close()
