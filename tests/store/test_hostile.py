"""What an agent may send to the store's server, and what becomes of the rest: a 4xx, and nobody waits for it."""

from __future__ import annotations

import asyncio
import gc
import gzip
import io
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agentlightning.errors import ConfigError
from agentlightning.keys import SPANS
from agentlightning.net.backoff import Backoff
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.server import ConnectionLimits
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.store.http import otlp, size
from agentlightning.types import AttemptedRollout
from tests.store.builders import make_span

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
    "spans": (GZIPPED, lambda: gzip.compress(many_empty_spans(2_000_000))),
    "attributes": (GZIPPED, lambda: gzip.compress(many_empty_attributes(2_000_000))),
    "bytes": (GZIPPED, lambda: gzip.compress(bytes(2**27))),
    "json": ({"Content-Type": "application/json"}, lambda: b'{"a":[' + b"{}," * 2_000_000 + b"{}]}"),
}


@pytest.mark.slow
@pytest.mark.quick_with("bytes")
@pytest.mark.parametrize("name", BOMBS)
async def test_an_otlp_bomb_is_too_large(agent: aiohttp.ClientSession, name: str) -> None:
    headers, made = BOMBS[name]
    async with agent.post("/v1/traces", data=io.BytesIO(made()), headers=headers) as response:
        assert response.status == 413, await response.text()
        assert "send smaller batches" in await response.text()


@pytest.mark.slow
async def test_who_is_refused_waits_and_nobody_else(server: LightningStoreServer, agent: aiohttp.ClientSession) -> None:
    other = await server.store.start_rollout("task")
    key = server.key_for(other.rollout_id, other.attempt.attempt_id, (SPANS,))
    server._intake.backoff = Backoff(40)  # pyright: ignore[reportPrivateUsage]
    spans, loop = spans_of(make_span(other).model_dump(mode="json")), asyncio.get_running_loop()
    headers, made = BOMBS["spans"]
    bomb = made()
    before = loop.time()
    assert await _post(agent, "/v1/traces", headers, bomb) == 413
    took, refused = loop.time() - before, loop.time()
    async with aiohttp.ClientSession(server.endpoint, headers={"Authorization": f"Bearer {key}"}) as neighbour:
        waiting = asyncio.create_task(_post(agent, SPANS_PATH, JSON, b"[]"))
        for _ in range(3):
            assert await _post(neighbour, SPANS_PATH, JSON, spans) == 200
        assert not waiting.done()
    assert await waiting == 200
    assert 0.02 <= loop.time() - refused <= 40 * took + 30


@pytest.mark.parametrize("body", [b"[" + b"{}," * 300_000 + b"{}]", b"[" + b"{}," * size.MAX_SPANS + b"{}]"])
async def test_a_heap_of_spans_is_too_large(agent: aiohttp.ClientSession, body: bytes) -> None:
    async with agent.post("/v1/agl/spans", data=body, headers=JSON) as response:
        assert response.status == 413, await response.text()


SHAPES: dict[str, tuple[str, int, Callable[[dict[str, Any]], bytes]]] = {
    "a text of 15 MB": ("spans", 200, lambda span: spans_of({**span, "attributes": {"a": "x" * 15_000_000}})),
    "escapes": ("spans", 200, lambda span: spans_of({**span, "attributes": {"a": "\1" * 2_000_000}})),
    "numbers": ("spans", 200, lambda span: spans_of({**span, "attributes": {"a": [7] * 240_000}})),
    "a million numbers": ("spans", 413, lambda span: spans_of({**span, "attributes": {"a": [7] * 1_000_000}})),
    "commas in a text": ("spans", 200, lambda span: spans_of({**span, "attributes": {"a": ',"' * 1_000_000}})),
    "a number of 4 million digits": ("spans", 422, lambda span: with_number(span, b"7" * 4_000_000)),
    "numbers of 4,000 digits": ("spans", 200, lambda span: with_number(span, b",".join([b"7" * 4000] * 3000))),
    "deep lists": ("spans", 422, lambda span: with_number(span, b"[" * 200_000 + b"]" * 200_000)),
    "spans that are none": ("spans", 422, lambda span: spans_of(*[{"name": "x" * 100}] * 4_990)),
    "small spans": ("spans", 200, lambda span: spans_of(*[{**span, "span_id": f"{n:016x}"} for n in range(4_990)])),
    "wrong events": ("spans", 422, lambda span: spans_of({**span, "events": [{}] * 100_000})),
    "OTLP: numbers": ("json", 200, lambda span: otlp_of(span, [{"intValue": "7"}] * 100_000)),
    "OTLP: a million numbers": ("json", 413, lambda span: otlp_of(span, [7] * 1_000_000)),
    "OTLP: deep lists": ("json", 422, lambda span: otlp_of(span, []).replace(b"[]", b"[" * 10**5 + b"]" * 10**5)),
    "OTLP: empty spans": ("protobuf", 200, lambda span: gzip.compress(many_empty_spans(4_990))),
    "OTLP: attributes": ("protobuf", 200, lambda span: gzip.compress(many_empty_attributes(size.MAX_FIELDS - 10))),
    "OTLP: a text of 60 MB": ("protobuf", 200, lambda span: gzip.compress(otlp_text(span, 60_000_000), 1)),
}
"""How a body is shaped, where it is sent to, and what comes back."""
QUICK = ("escapes", "a million numbers", "deep lists", "OTLP: a million numbers", "OTLP: attributes")
"""One of each kind: read, too large, no JSON, and the same of OTLP."""


def spans_of(*spans: dict[str, Any]) -> bytes:
    return json.dumps(spans).encode()


def with_number(span: dict[str, Any], written: bytes) -> bytes:
    return spans_of({**span, "attributes": {"a": ["here"]}}).replace(b'"here"', written)


def otlp_of(span: dict[str, Any], values: list[Any]) -> bytes:
    owner = [{"key": f"agentlightning.{k}", "value": {"stringValue": span[k]}} for k in ("rollout_id", "attempt_id")]
    given = {"traceId": span["trace_id"], "spanId": span["span_id"], "name": "x"}
    said = [{"key": "a", "value": {"arrayValue": {"values": values}}}, *owner]
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [{**given, "attributes": said}]}]}]}).encode()


def otlp_text(span: dict[str, Any], length: int) -> bytes:
    export = ExportTraceServiceRequest()
    one = export.resource_spans.add().scope_spans.add().spans.add()
    one.trace_id, one.span_id = bytes.fromhex(span["trace_id"]), bytes.fromhex(span["span_id"])
    for key in ("rollout_id", "attempt_id"):
        one.attributes.add(key=f"agentlightning.{key}").value.string_value = span[key]
    one.attributes.add(key="a").value.string_value = "x" * length
    return export.SerializeToString()


@pytest.mark.slow
@pytest.mark.quick_with("deep lists", "OTLP: attributes")
@pytest.mark.parametrize("shape", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in SHAPES])
async def test_no_body_holds_the_server_up(
    server: LightningStoreServer, agent: aiohttp.ClientSession, shape: str
) -> None:
    """Between two turns of the event loop the whole process computes for a moment only, in whichever thread."""
    (claim,) = await server.store.query_rollouts()
    assert isinstance(claim, AttemptedRollout)
    kind, expected, make = SHAPES[shape]
    body = make(make_span(claim).model_dump(mode="json", exclude_none=True))
    headers = {"protobuf": GZIPPED}.get(kind, {"Content-Type": "application/json"})
    path = "/v1/agl/spans" if kind == "spans" else "/v1/traces"
    gc.collect()
    gc.freeze()  # what earlier tests have left in this process is not the server's to go through
    try:
        sending = asyncio.create_task(_post(agent, path, headers, body))
        longest, before = 0.0, time.process_time()
        while not sending.done():
            await asyncio.sleep(0)
            now = time.process_time()
            longest, before = max(longest, now - before), now
        assert await sending == expected
    finally:
        gc.unfreeze()
    assert longest < 0.15, f"{longest:.3f} s"


@pytest.mark.slow
async def test_who_sends_large_bodies_takes_turns_with_others(
    server: LightningStoreServer, agent: aiohttp.ClientSession
) -> None:
    other = await server.store.start_rollout("task")
    key = server.key_for(other.rollout_id, other.attempt.attempt_id, (SPANS,))
    (mine,) = [one for one in await server.store.query_rollouts() if one.rollout_id != other.rollout_id]
    assert isinstance(mine, AttemptedRollout)

    def body(claim: AttemptedRollout) -> bytes:
        return spans_of(make_span(claim, "large", text="x" * 2_000_000).model_dump(mode="json"))

    path, headers, answered = "/v1/agl/spans", {"Content-Type": "application/json"}, list[str]()

    async def send(name: str, session: aiohttp.ClientSession, claim: AttemptedRollout) -> None:
        assert await _post(session, path, headers, body(claim)) == 200
        answered.append(name)

    async with aiohttp.ClientSession(server.endpoint, headers={"Authorization": f"Bearer {key}"}) as neighbour:
        many = [asyncio.create_task(send("many", agent, mine)) for _ in range(12)]
        await asyncio.sleep(0.3)
        await asyncio.gather(*many, send("one", neighbour, other))
    assert answered.index("one") < 11


@pytest.mark.slow
async def test_the_process_for_large_bodies_is_started_again(
    server: LightningStoreServer, agent: aiohttp.ClientSession
) -> None:
    (claim,) = await server.store.query_rollouts()
    assert isinstance(claim, AttemptedRollout)

    async def send() -> int:
        body = spans_of(make_span(claim, "large", text="x" * 100_000).model_dump(mode="json"))
        return await _post(agent, "/v1/agl/spans", {"Content-Type": "application/json"}, body)

    assert await send() == 200
    (first,) = _readers()
    first.kill()  # while nobody asks: nobody is told
    await asyncio.to_thread(first.wait, 10)
    assert await send() == 200
    (second,) = [reader for reader in _readers() if reader.pid != first.pid]
    second.suspend()
    sending = asyncio.create_task(send())
    await asyncio.sleep(0.2)
    second.kill()
    assert await sending == 503
    assert await send() == 200


async def test_a_process_for_large_bodies_that_cannot_be_started_is_said(
    server: LightningStoreServer, agent: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    (claim,) = await server.store.query_rollouts()
    assert isinstance(claim, AttemptedRollout)

    async def none(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(HelperProcess, "start", none)
    body = spans_of(make_span(claim, "large", text="x" * 100_000).model_dump(mode="json"))
    assert await _post(agent, "/v1/agl/spans", {"Content-Type": "application/json"}, body) == 503
    monkeypatch.undo()
    assert await _post(agent, "/v1/agl/spans", {"Content-Type": "application/json"}, body) == 200


def _readers() -> list[psutil.Process]:
    """The processes for large bodies that live."""
    found = [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    return [p for p in found if "agentlightning.store.http.reader" in p.cmdline()]


async def _post(session: aiohttp.ClientSession, path: str, headers: dict[str, str], body: bytes) -> int:
    async with session.post(path, data=io.BytesIO(body), headers=headers) as response:
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
    writer.write(
        f"POST {SPANS_PATH} HTTP/1.1\r\n{lines}content-type: application/json\r\ncontent-length: 1000\r\n\r\n".encode()
        + sent
    )
    await writer.drain()
    return reader, writer


async def test_a_body_of_an_agents_must_come_in_time(
    server: LightningStoreServer, agent: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.http.server.BODY_SECONDS", 0.2)
    reader, writer = await drip(server, dict(agent.headers), b"[")
    assert b"408" in await reader.readuntil(b"\r\n")
    writer.close()


async def test_what_one_agent_sends_at_once_is_bounded(
    server: LightningStoreServer, agent: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentlightning.store.http.server.MAX_HELD_BYTES", 150)
    _, writer = await drip(server, dict(agent.headers), b"[" + b" " * 99)
    await asyncio.sleep(0.2)
    async with agent.post(SPANS_PATH, data=b"[" + b" " * 100 + b"]", headers=JSON) as answer:
        assert (answer.status, "together" in await answer.text()) == (429, True)
    writer.close()
    await writer.wait_closed()
    async with agent.post(SPANS_PATH, data=b"[" + b" " * 100 + b"]", headers=JSON) as answer:
        assert answer.status == 200, await answer.text()


@pytest.mark.slow
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


@pytest.mark.parametrize(("count", "short"), [(10, True), (1_000, False)])
def test_what_says_many_things_is_not_short(count: int, short: bool) -> None:
    body = many_empty_spans(count)
    assert otlp.is_short(False, "", body) is short
    assert otlp.is_short(False, "gzip", gzip.compress(body)) is short
    assert otlp.is_short(True, "", b"[" + b"{}," * count + b"{}]") is short
