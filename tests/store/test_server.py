"""The server: errors, keys, long polls that lose their client, OTLP from a real exporter, and the client's retries."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from agentlightning.errors import ConfigError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.keys import CALLS, REWARDS, SPANS, TASK, sign_attempt_key, sign_url_key
from agentlightning.store import LightningStoreClient, LightningStoreServer, SqliteLightningStore
from agentlightning.store.http import api, otlp, server as http_server, transport
from agentlightning.types import AttemptedRollout, AttemptStatus, RolloutStatus
from tests.store.builders import make_span

SECRET = b"s" * 32


@pytest.fixture
async def embedded(tmp_path: Path) -> AsyncIterator[SqliteLightningStore]:
    store = SqliteLightningStore(tmp_path / "store.db", watchdog_seconds=0.05)
    yield store
    await store.close()


@pytest.fixture
async def server(embedded: SqliteLightningStore) -> AsyncIterator[LightningStoreServer]:
    server = LightningStoreServer(embedded, port=0, admin_key="admin", secret=SECRET)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def http(server: LightningStoreServer) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": "Bearer admin"}
    async with aiohttp.ClientSession(server.endpoint, headers=headers) as session:
        yield session


async def test_errors_are_problem_details(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/agl/rollouts/no") as response:
        assert response.status == 404
        assert response.content_type == "application/problem+json"
        assert "no rollout 'no'" in (await response.json())["detail"]
    async with http.post(
        "/v1/agl/queues/rollouts/enqueue", data=b"{", headers={"Content-Type": "application/json"}
    ) as response:
        assert response.status == 422
        assert response.content_type == "application/problem+json"
    async with http.post("/v1/agl/queues/rollouts/enqueue", json={"rollouts": [{"inputs": 1}]}) as response:
        assert response.status == 422
        assert "rollouts.0.inputs" in (await response.json())["detail"]
    async with http.get("/v1/agl/rollouts?sort_by=input") as response:
        assert response.status == 422
        assert "Cannot sort" in (await response.json())["detail"]
    async with http.post(
        "/v1/agl/calls", data=b"nonsense", headers={"Content-Type": "application/vnd.msgpack"}
    ) as response:
        assert response.status == 422


async def test_lists_by_get_and_by_search(http: aiohttp.ClientSession, embedded: SqliteLightningStore) -> None:
    for number in range(3):
        await embedded.enqueue_rollout(number, rollout_id=f"r{number}")
    async with http.get("/v1/agl/rollouts?status_in=queuing&limit=2&sort_order=desc") as response:
        page = await response.json()
    async with http.post(
        "/v1/agl/rollouts/search", json={"status_in": ["queuing"], "limit": 2, "sort_order": "desc"}
    ) as response:
        assert await response.json() == page
    assert ([r["input"] for r in page["items"]], page["total"]) == ([2, 1], 3)


async def test_metrics_for_prometheus(http: aiohttp.ClientSession, embedded: SqliteLightningStore) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    await embedded.enqueue_rollout(1)
    async with http.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["agl_rollouts"].documentation == "Rollouts by status."
    by_status = {sample.labels["status"]: sample.value for sample in families["agl_rollouts"].samples}
    assert (by_status.keys(), by_status["queuing"]) == ({status.value for status in RolloutStatus}, 1)
    statistics = {**await embedded.statistics(), "total_spans": 123_456_789}
    assert "\nagl_spans 123456789\n" in api.render(statistics)  # pyright: ignore[reportArgumentType]


def test_other_addresses_need_a_key(embedded: SqliteLightningStore) -> None:
    with pytest.raises(ConfigError, match="admin_key"):
        LightningStoreServer(embedded, host="0.0.0.0")


async def test_a_taken_port(server: LightningStoreServer, embedded: SqliteLightningStore) -> None:
    port = int(server.endpoint.rsplit(":", 1)[1])
    with pytest.raises(StoreError, match="cannot listen"):
        await LightningStoreServer(embedded, port=port).start()


async def _status(server: LightningStoreServer, key: str, method: str, path: str, body: object = None) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(server.endpoint, headers=headers) as session,
        session.request(method, path, json=body) as response,
    ):
        return response.status


async def test_an_attempts_key_opens_its_attempt_only(
    server: LightningStoreServer, embedded: SqliteLightningStore
) -> None:
    mine, other = await embedded.start_rollout("mine"), await embedded.start_rollout("other")
    key = server.key_for(mine.rollout_id, mine.attempt.attempt_id, (SPANS, TASK))
    grader = server.key_for(mine.rollout_id, mine.attempt.attempt_id, (SPANS, REWARDS))

    def spans(claim: AttemptedRollout, **attributes: object) -> object:
        return [make_span(claim, "step", **attributes).model_dump(mode="json")]

    reward = {"agentlightning.reward.0.value": 1.0}
    assert await _status(server, key, "GET", f"/v1/agl/rollouts/{mine.rollout_id}") == 200
    assert await _status(server, key, "POST", "/v1/agl/spans", spans(mine)) == 200
    assert await _status(server, grader, "POST", "/v1/agl/spans", spans(mine, **reward)) == 200
    forbidden = [
        (key, "GET", f"/v1/agl/rollouts/{other.rollout_id}", None),
        (grader, "GET", f"/v1/agl/rollouts/{mine.rollout_id}", None),
        (key, "POST", "/v1/agl/spans", spans(other)),
        (key, "POST", "/v1/agl/spans", spans(mine, **reward)),
        (grader, "POST", "/v1/agl/spans", spans(mine, **{"agentlightning.triplet.json": "{}"})),
        (grader, "POST", "/v1/agl/spans", spans(mine, **{"agentlightning.call_id": "c"})),
        (grader, "POST", "/v1/agl/spans", [make_span(mine, "agentlightning.triplet").model_dump(mode="json")]),
        (key, "GET", "/v1/agl/rollouts", None),
        (key, "POST", f"/v1/agl/rollouts/{mine.rollout_id}/attempts/latest", {"status": "succeeded"}),
        (key, "GET", "/v1/agl/statistics", None),
    ]
    for request in forbidden:
        assert await _status(server, *request) == 403, request
    assert await _status(server, key, "POST", "/v1/agl/spans", {"no": "list"}) == 422
    assert await _status(server, "wrong", "GET", "/v1/agl/statistics") == 401
    assert await _status(server, "é", "GET", "/v1/agl/statistics") == 401
    assert await _status(server, key + "x", "POST", "/v1/agl/spans", spans(mine)) == 401
    assert await _status(server, "", "GET", "/v1/agl/health") == 200


@pytest.mark.slow
async def test_an_agent_cannot_fill_the_servers_memory(
    server: LightningStoreServer, embedded: SqliteLightningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "_MAX_BODY_BYTES", 100_000)
    mine = await embedded.start_rollout("mine")
    key = server.key_for(mine.rollout_id, mine.attempt.attempt_id, (SPANS,))
    large = [make_span(mine, "step", text="x" * 100_000).model_dump(mode="json")]
    assert await _status(server, key, "POST", "/v1/agl/spans", large) == 413
    assert await _status(server, "admin", "POST", "/v1/agl/spans", large) == 200


async def test_a_client_without_the_key(server: LightningStoreServer) -> None:
    client = LightningStoreClient(server.endpoint)
    with pytest.raises(StoreError, match="key"):
        await client.statistics()
    await client.close()
    with pytest.raises(StoreError, match="closed"):
        await client.statistics()


async def test_a_long_poll_whose_client_went_away_claims_nothing(
    server: LightningStoreServer, embedded: SqliteLightningStore
) -> None:
    client = LightningStoreClient(server.endpoint, key="admin")
    waiting = asyncio.ensure_future(client.dequeue_rollout("w", timeout=20))
    await asyncio.sleep(0.2)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0.2)
    await embedded.enqueue_rollout(1)
    assert (await embedded.statistics())["rollouts"]["queuing"] == 1
    await client.close()


async def test_a_client_outlives_a_restart_of_the_server(embedded: SqliteLightningStore) -> None:
    server = LightningStoreServer(embedded, port=0)
    await server.start()
    port = int(server.endpoint.rsplit(":", 1)[1])
    client = LightningStoreClient(server.endpoint)
    claim = await client.start_rollout(1)
    await server.stop()
    writes = [asyncio.ensure_future(client.add_span(make_span(claim, str(n)))) for n in range(50)]
    await asyncio.sleep(0.2)
    server = LightningStoreServer(embedded, port=port)
    await server.start()
    assert all(span is not None for span in await asyncio.gather(*writes))
    assert (await embedded.query_spans(claim.rollout_id)).total == 50
    await client.close()
    await server.stop()


async def test_an_address_with_a_path_behind_it(server: LightningStoreServer) -> None:
    for more in ("/v1", "/dashboard/"):
        client = LightningStoreClient(server.endpoint + more, key="admin")
        with pytest.raises(NotFoundError, match=f"given without a path: {server.endpoint}, and not {server.endpoint}/"):
            await client.statistics()
        await client.close()


@pytest.mark.parametrize("answer", [b'{"error": {"message": "There is no path"}}', b"<html>", b""])
async def test_a_server_that_is_no_store(answer: bytes) -> None:
    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: {len(answer)}\r\n\r\n"
        writer.write(head.encode() + answer)
        writer.close()

    async with await asyncio.start_server(other, "127.0.0.1", 0) as listening:
        client = LightningStoreClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        with pytest.raises(StoreError, match=r"is no store: it answers 404\. Give the address that agl store prints"):
            await client.statistics()
        await client.close()


async def test_a_server_that_is_not_there() -> None:
    client = LightningStoreClient("http://127.0.0.1:9", retry_seconds=0.2)
    start = time.monotonic()
    with pytest.raises(StoreUnavailableError, match=r"cannot be reached.*agl store"):
        await client.enqueue_rollout(1)
    assert time.monotonic() - start < 5
    await client.close()


async def test_one_that_is_waited_for_is_named_once(
    embedded: SqliteLightningStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "REPORTED_AFTER", 0.1)
    server = LightningStoreServer(embedded, port=0)
    await server.start()
    port = int(server.endpoint.rsplit(":", 1)[1])
    client = LightningStoreClient(server.endpoint, retry_seconds=20)

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == transport.__name__]

    polling = asyncio.ensure_future(client.wait_for_rollouts(rollout_ids=["none"], timeout=10))
    await asyncio.sleep(0.5)
    assert not said(), "an answer that takes long is no failure"
    for again in (60.0, 60.0, 0.0):
        monkeypatch.setattr(transport, "REPORTED_AGAIN", again)
        await server.stop()
        asked = [asyncio.ensure_future(client.statistics()) for _ in range(5)]
        await asyncio.sleep(0.5)
        server = LightningStoreServer(embedded, port=port)
        await server.start()
        await asyncio.gather(*asked)
        assert (len(said()) == 1) == (again > 0), "once, until it may be said again"
    polling.cancel()
    assert all("cannot be reached" in text and "is tried again for" in text for text in said())
    await client.close()
    await server.stop()


async def test_one_bad_span_spares_its_batch(server: LightningStoreServer) -> None:
    client = LightningStoreClient(server.endpoint, key="admin")
    claim = await client.start_rollout(1)
    spans = [make_span(claim, str(n)) for n in range(10)]
    spans[4] = spans[4].model_copy(update={"attempt_id": "no"})
    results = await asyncio.gather(*[client.add_span(span) for span in spans], return_exceptions=True)
    assert [n for n, result in enumerate(results) if isinstance(result, NotFoundError)] == [4]
    assert (await client.query_spans(claim.rollout_id)).total == 9
    await client.close()


async def test_cancelling_a_rollout_over_http(server: LightningStoreServer) -> None:
    client = LightningStoreClient(server.endpoint, key="admin")
    claim = await client.start_rollout(1)
    await client.update_rollout(claim.rollout_id, status=RolloutStatus.CANCELLED)
    attempt = await client.update_attempt(claim.rollout_id, "latest", last_heartbeat_time=time.time())
    assert attempt.status is AttemptStatus.CANCELLED
    await client.close()


# ---- OTLP ------------------------------------------------------------------------------------------------------------


def _export(claim: AttemptedRollout | None) -> ExportTraceServiceRequest:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    if claim is not None:
        owner = {otlp.ROLLOUT_KEY: claim.rollout_id, otlp.ATTEMPT_KEY: claim.attempt.attempt_id}
        for key, value in owner.items():
            group.resource.attributes.add(key=key).value.string_value = value
    span = group.scope_spans.add().spans.add()
    span.name, span.trace_id, span.span_id = "chat", b"t" * 16, b"s" * 8
    span.parent_span_id = b"p" * 8
    span.start_time_unix_nano, span.end_time_unix_nano = 1_500_000_000, 2_000_000_000
    span.attributes.add(key="n").value.int_value = 3
    values = span.attributes.add(key="list").value.array_value.values
    values.add().string_value = "a"
    values.add().double_value = 0.5
    span.events.add(name="event", time_unix_nano=1_600_000_000)
    span.status.code, span.status.message = Status.STATUS_CODE_ERROR, "boom"
    return request


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_otlp_protobuf(http: aiohttp.ClientSession, embedded: SqliteLightningStore, encoding: str) -> None:
    claim = await embedded.start_rollout(1)
    body = _export(claim).SerializeToString()
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": encoding}
    async with http.post(
        "/v1/traces", data=gzip.compress(body) if encoding == "gzip" else body, headers=headers
    ) as response:
        assert response.status == 200
        answer = ExportTraceServiceResponse.FromString(await response.read())
    assert answer.partial_success.rejected_spans == 0
    (span,) = await embedded.query_spans(claim.rollout_id)
    assert (span.name, span.trace_id, span.parent_id) == ("chat", (b"t" * 16).hex(), (b"p" * 8).hex())
    assert (span.start_time, span.end_time) == (1.5, 2.0)
    assert span.attributes == {"n": 3, "list": ["a", 0.5]}
    assert (span.status.status_code, span.status.description) == ("ERROR", "boom")
    assert span.events[0].timestamp == 1.6


async def test_otlp_json(http: aiohttp.ClientSession, embedded: SqliteLightningStore) -> None:
    claim = await embedded.start_rollout(1)
    attributes = [
        {"key": otlp.ROLLOUT_KEY, "value": {"stringValue": claim.rollout_id}},
        {"key": otlp.ATTEMPT_KEY, "value": {"stringValue": claim.attempt.attempt_id}},
    ]
    span = {"traceId": "5b" * 16, "spanId": "ee" * 8, "name": "json", "startTimeUnixNano": "1000000000"}
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [{**span, "attributes": attributes}]}]}]}
    async with http.post("/v1/traces", json=body) as response:
        assert response.status == 200
    (stored,) = await embedded.query_spans(claim.rollout_id)
    assert (stored.trace_id, stored.span_id, stored.start_time) == ("5b" * 16, "ee" * 8, 1.0)


async def test_keys_of_attempts_in_spans_of_other_processes_are_shortened(
    http: aiohttp.ClientSession, embedded: SqliteLightningStore
) -> None:
    """Instrumented HTTP clients record the URL that they asked, and headers; both open the attempt."""
    claim = await embedded.start_rollout(1)
    url_key = sign_url_key(b"secret", claim.rollout_id, claim.attempt.attempt_id, (CALLS,))
    api_key = sign_attempt_key(b"secret", claim.rollout_id, claim.attempt.attempt_id)
    url = f"http://127.0.0.1:1/rollout/r/attempt/a/key/{url_key}/v1/chat/completions"
    export = _export(claim)
    group = export.resource_spans[0]
    span = group.scope_spans[0].spans[0]
    span.name = f"POST {url}"
    span.attributes.add(key="url.full").value.string_value = url
    header = span.attributes.add(key="http.request.header.authorization").value.array_value.values
    header.add().string_value = f"Bearer {api_key}"
    span.attributes.add(key="body").value.string_value = f"to\n{api_key}\nand"
    span.events[0].attributes.add(key="http.url").value.string_value = url
    span.links.add(trace_id=b"t" * 16, span_id=b"l" * 8).attributes.add(key="url").value.string_value = url
    span.status.message = f"no answer from {url}"
    group.resource.attributes.add(key="OPENAI_BASE_URL").value.string_value = url
    headers = {"Content-Type": "application/x-protobuf"}
    async with http.post("/v1/traces", data=export.SerializeToString(), headers=headers) as response:
        assert response.status == 200
    owner = {"rollout_id": claim.rollout_id, "attempt_id": claim.attempt.attempt_id}
    told = {**owner, "trace_id": "1" * 32, "span_id": "2" * 16, "name": "told", "attributes": {"asked": [{"at": url}]}}
    async with http.post("/v1/agl/spans", json=[told]) as response:
        assert response.status == 200
    stored = list(await embedded.query_spans(claim.rollout_id))
    text = "".join(found.model_dump_json() for found in stored)
    assert len(stored) == 2
    assert url_key not in text
    assert api_key not in text
    assert text.count(f"/key/{url_key[:5]}…/v1/chat/completions") == 7, "but one can tell which it was"
    assert text.count(f"{api_key[:7]}…") == 2


async def test_otlp_spans_of_nobody_are_rejected_with_the_reason(http: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/x-protobuf"}
    async with http.post("/v1/traces", data=_export(None).SerializeToString(), headers=headers) as response:
        answer = ExportTraceServiceResponse.FromString(await response.read())
    assert answer.partial_success.rejected_spans == 1
    assert otlp.ROLLOUT_KEY in answer.partial_success.error_message


async def test_otlp_spans_without_ids_are_rejected_and_the_others_kept(
    http: aiohttp.ClientSession, embedded: SqliteLightningStore
) -> None:
    claim = await embedded.start_rollout(1)
    request = _export(claim)
    spans = request.resource_spans[0].scope_spans[0].spans
    for trace_id, span_id in ((b"", b"s" * 8), (b"t" * 16, b""), (b"t" * 16, bytes(8))):
        spans.add(name="odd", trace_id=trace_id, span_id=span_id)
    headers = {"Content-Type": "application/x-protobuf"}
    async with http.post("/v1/traces", data=request.SerializeToString(), headers=headers) as response:
        answer = ExportTraceServiceResponse.FromString(await response.read())
    assert answer.partial_success.rejected_spans == 3
    assert "no span id" in answer.partial_success.error_message
    assert [span.name for span in await embedded.query_spans(claim.rollout_id)] == ["chat"]


async def test_otlp_that_breaks_off_is_refused(http: aiohttp.ClientSession, embedded: SqliteLightningStore) -> None:
    """Half a gzip of many spans may well be a valid message of fewer."""
    claim = await embedded.start_rollout(1)
    one = _export(claim).SerializeToString()
    body = gzip.compress(one)
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    async with http.post("/v1/traces", data=body[:-6], headers=headers) as response:
        assert response.status == 422
        assert "breaks off" in (await response.json())["detail"]
    assert (await embedded.query_spans(claim.rollout_id)).total == 0


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    body=st.one_of(
        st.binary(max_size=300),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(),
            lambda inner: (
                st.lists(inner) | st.dictionaries(st.sampled_from(["resourceSpans", "spanId", "spans"]), inner)
            ),
        ).map(lambda value: json.dumps(value).encode()),
    ),
    is_json=st.booleans(),
    encoding=st.sampled_from(["", "gzip", "br"]),
    compress=st.booleans(),
)
def test_fuzzed_otlp_is_read_or_refused(body: bytes, is_json: bool, encoding: str, compress: bool) -> None:
    with contextlib.suppress(StoreError):
        list(otlp.spans_in(is_json, encoding, gzip.compress(body) if compress else body))
