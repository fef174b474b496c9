"""Clients, providers and weights that misbehave: nothing hangs past its deadline, is recorded twice, or gets lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import openai
import pytest

from agentlightning.gateway import Gateway, Provider
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import RolloutMode
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK: Any = [{"role": "user", "content": "What is 2 + 3?"}]
TIMEOUT = 0.4
"""The providers' deadline, in seconds."""
MARGIN = 3.0
"""How much later an answer may come on a busy machine."""

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
EVENT = b'data: {"id": "far-1", "choices": [{"index": 0, "delta": {"content": "Fro"}}]}\n\n'
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


async def stalls(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def hangs_up(_: asyncio.StreamWriter) -> None:
    return


async def half_a_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM + _chunk(EVENT))
    await writer.drain()
    await asyncio.sleep(0.05)


async def half_an_event(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM + _chunk(EVENT + EVENT[:20]))
    await writer.drain()


async def a_stream_that_stalls(writer: asyncio.StreamWriter) -> None:
    await half_a_stream(writer)
    await asyncio.sleep(60)


async def half_a_body(writer: asyncio.StreamWriter) -> None:
    writer.write(JSON % 1000 + b'{"id": "far-1", ')
    await writer.drain()


async def no_json(writer: asyncio.StreamWriter) -> None:
    writer.write(JSON % 9 + b"{not json")
    await writer.drain()


async def too_busy(writer: asyncio.StreamWriter) -> None:
    said = b'{"error": {"message": "slow down"}}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nRetry-After: 7\r\nSet-Cookie: a=b\r\n"
    more = b"X-RateLimit-Remaining-Requests: 0\r\nx-request-id: req_1\r\nContent-Length: %d\r\n\r\n" % len(said)
    writer.write(head + more + said)
    await writer.drain()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


WAYS: dict[str, Answer] = {
    f.__name__: f
    for f in (stalls, hangs_up, half_a_stream, half_an_event, a_stream_that_stalls, half_a_body, no_json, too_busy)
}


class Rogue:
    """A provider that answers each request in the way that the request's model names."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.bytes: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            model = json.loads(body)["model"]
            self.asked[model] += 1
            self.bytes.append(length)
            await WAYS[model](writer)
        writer.close()


@pytest.fixture
async def rogue(site: Site) -> AsyncIterator[Rogue]:
    """A rogue among the models of the gateway, by the names of its ways."""
    found = Rogue()
    async with await asyncio.start_server(found.serve, "127.0.0.1", 0, limit=2**25) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        far = {way: Provider(base_url=url, timeout_seconds=TIMEOUT) for way in WAYS}
        await site.gateway.update_model_list(far)
        yield found


async def _read(site: Site, model: str, stream: bool, messages: Any = ASK) -> str:
    async with site.client() as client:
        create: Any = client.chat.completions.create
        reply = await create(model=model, messages=messages, stream=stream)
        if not stream:
            return reply.choices[0].message.content
        return "".join([p.choices[0].delta.content or "" async for p in reply if p.choices])


# ---- providers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["stalls", "hangs_up"])
async def test_a_provider_that_does_not_answer_is_an_error_in_time_and_asked_once(
    site: Site, rogue: Rogue, way: str, stream: bool
) -> None:
    async with asyncio.timeout(TIMEOUT + MARGIN):
        with pytest.raises(openai.InternalServerError, match="did not answer") as refused:
            await _read(site, way, stream)
    assert refused.value.status_code == 502
    assert rogue.asked[way] == 1, "what was sent may have been answered; it is not sent again"
    await site.close()
    (span,) = await site.spans()
    assert span.status.status_code == "ERROR"


@pytest.mark.parametrize("way", ["half_a_stream", "half_an_event", "a_stream_that_stalls"])
async def test_a_stream_that_breaks_off_breaks_off_for_the_client_too(site: Site, rogue: Rogue, way: str) -> None:
    async with asyncio.timeout(TIMEOUT + MARGIN):
        with pytest.raises((openai.APIError, httpx_error())):
            await _read(site, way, stream=True)
    assert rogue.asked[way] == 1
    await site.close()
    (span,) = await site.spans()
    assert span.status.status_code == "ERROR"
    assert '"content": "Fro"' in str(span.attributes["agentlightning.response"]), "what had come is kept"


async def test_a_client_is_told_when_to_come_back(site: Site, rogue: Rogue) -> None:
    with pytest.raises(openai.RateLimitError, match="slow down") as refused:
        await _read(site, "too_busy", stream=False)
    headers = refused.value.response.headers
    assert (headers["retry-after"], headers["x-ratelimit-remaining-requests"]) == ("7", "0")
    assert refused.value.request_id == "req_1"
    assert "set-cookie" not in headers
    summary = await site.gateway.close_attempt(site.rollout_id, site.attempt_id)
    assert "answered 429" in (summary.infra_error or "")


async def test_half_an_answer_is_no_answer(site: Site, rogue: Rogue) -> None:
    async with asyncio.timeout(TIMEOUT + MARGIN):
        with pytest.raises((openai.APIError, httpx_error())):
            await _read(site, "half_a_body", stream=False)
    await site.close()
    (span,) = await site.spans()
    assert span.status.status_code == "ERROR"


async def test_what_is_no_json_is_passed_on_and_recorded_as_it_is(site: Site, rogue: Rogue) -> None:
    with pytest.raises((openai.APIError, ValueError)):
        await _read(site, "no_json", stream=False)
    await site.close()
    (span,) = await site.spans()
    assert span.attributes["agentlightning.response"] == "{not json"


@pytest.mark.slow
async def test_ten_megabytes_go_through_to_a_provider(site: Site, rogue: Rogue) -> None:
    with pytest.raises((openai.APIError, ValueError)):
        await _read(site, "no_json", stream=False, messages=[{"role": "user", "content": "x" * 10**7}])
    assert rogue.bytes[0] > 10**7


def httpx_error() -> type[Exception]:
    """What the openai client lets through when a body is cut off."""
    try:
        from httpx2 import HTTPError
    except ImportError:
        from httpx import HTTPError
    return HTTPError


# ---- clients -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _wire(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    port = int(site.gateway.endpoint.split(":")[2].split("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        yield reader, writer
    finally:
        writer.close()


def _request(site: Site, body: bytes, length: int | None = None) -> bytes:
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: Bearer {site.key}\r\n"
    )
    return f"{head}Content-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


async def test_a_body_that_never_ends_is_refused_in_time(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, read_seconds=0.2) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with _wire(site) as (reader, writer), asyncio.timeout(MARGIN):
            writer.write(_request(site, b'{"model": "pol', length=1000))
            assert b" 408 " in await reader.readline()
        async with _wire(site) as (_, writer):
            writer.write(_request(site, b'{"model": "pol', length=1000))
        assert await _read(site, "policy", stream=False)
        assert len(await site.close()) == 1


@pytest.mark.slow
async def test_a_client_that_does_not_read_holds_up_nobody(site: Site) -> None:
    """Its answer is sampled, recorded, and thrown away when the gateway stops."""
    site.engine.script = lambda prompt, params: "word " * 500
    body = json.dumps({"model": "policy", "messages": ASK, "stream": True, "logprobs": True, "top_logprobs": 20})
    async with _wire(site) as (_, writer):
        writer.write(_request(site, body.encode()))
        await _until(lambda: len(site.engine.sampled) == 1)
        assert await _read(await site.another(), "policy", stream=True)
        async with asyncio.timeout(MARGIN):
            (call,) = await site.close()
        site.check_exact([call])
        async with asyncio.timeout(3 + MARGIN):  # uvicorn's grace
            await site.gateway.stop()


async def test_stopping_ends_what_is_open_and_records_it(site: Site) -> None:
    site.engine.delay = 0.05
    site.engine.script = lambda prompt, params: "word " * 500
    reading = asyncio.create_task(_read(site, "policy", stream=True))
    await _until(lambda: site.engine.running == 1)
    async with asyncio.timeout(3 + MARGIN):
        await site.gateway.stop()
    with pytest.raises((openai.APIError, httpx_error())):
        await reading
    await _until(lambda: site.engine.running == 0)
    (call,) = (await site.store.query_calls([site.rollout_id]))[site.rollout_id]
    assert call.info.error == "the gateway was stopped"
    assert 0 < len(call.response_ids) < 500


# ---- weights -------------------------------------------------------------------------------------------------------


async def test_while_weights_change_requests_wait_and_streams_are_kept_alive(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    """One stream is in flight and drains on the old weights; what comes meanwhile waits for the new ones."""
    claimed = await store.start_rollout(input={}, mode=RolloutMode.TRAIN)
    engine = ScriptedEngine(rendering, lambda prompt, params: "word " * 10)
    engine.delay = 0.02
    async with Gateway(store, engine, rendering, keep_alive_seconds=0.05) as gateway:
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        before = asyncio.create_task(_read(site, "policy", stream=True))
        await _until(lambda: engine.running == 1)
        engine.open.clear()
        waiting = [asyncio.create_task(_read(site, "policy", stream=s)) for s in (False, True) for _ in range(5)]
        body = json.dumps({"model": "policy", "messages": ASK, "stream": True}).encode()
        async with _wire(site) as (reader, writer):
            writer.write(_request(site, body))
            await before
            sent = await reader.readuntil(b": keep-alive")
            assert b" 200 " in sent
            assert not any(task.done() for task in waiting)
            engine.version = 1
            engine.open.set()
            async with asyncio.timeout(MARGIN):
                await asyncio.gather(*waiting)
                await reader.readuntil(b"[DONE]")
        calls = await site.close()
    assert sorted(call.versions[0].version for call in calls) == [0, *[1] * 11]
    site.check_exact(calls)


# ---- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_a_storm(site: Site, rogue: Rogue) -> None:
    """Hundreds of clients of ten attempts, most of them badly behaved, while weights change: the books balance."""
    dice = random.Random(7)
    site.engine.delay = 0.002
    places = [site] + [await site.another() for _ in range(9)]
    answered: Counter[str] = Counter()
    clients = {place.rollout_id: place.client() for place in places}

    async def good(place: Site) -> None:
        stream = dice.random() < 0.5
        create: Any = clients[place.rollout_id].chat.completions.create
        reply = await create(model="policy", messages=ASK, tools=[CALC], stream=stream)
        answered[place.rollout_id] += 1
        if stream:
            assert [part async for part in reply]

    async def leaves(place: Site) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(good(place), dice.random() * 0.1)

    async def nonsense(place: Site) -> None:
        async with _wire(place) as (reader, writer):
            writer.write(_request(place, dice.choice([b"{", b"[]", b'{"model": 1}', b"\xff" * 1000])))
            assert b" 400 " in await reader.readline()

    async def half(place: Site) -> None:
        async with _wire(place) as (_, writer):
            writer.write(_request(place, b'{"model"', length=100))
            await asyncio.sleep(dice.random() * 0.05)

    async def far(place: Site) -> None:
        with suppress(openai.APIError, httpx_error(), ValueError):
            create: Any = clients[place.rollout_id].chat.completions.create
            reply = await create(model=dice.choice(list(WAYS)), messages=ASK, stream=dice.random() < 0.5)
            _ = [part async for part in reply] if isinstance(reply, openai.AsyncStream) else reply

    async def weights() -> None:
        for _ in range(10):
            await asyncio.sleep(0.05)
            site.engine.open.clear()
            await asyncio.sleep(0.02)
            site.engine.version += 1
            site.engine.open.set()

    ways = [good, good, leaves, nonsense, half, far]
    async with asyncio.timeout(30):
        await asyncio.gather(weights(), *[dice.choice(ways)(dice.choice(places)) for _ in range(300)])
    await asyncio.gather(*[client.close() for client in clients.values()])
    await _until(lambda: site.engine.running == 0)
    names: set[str] = set()
    for place in places:
        calls = await place.close()
        whole = [call for call in calls if call.info.error is None]
        site.check_exact(whole)
        assert len(whole) >= answered[place.rollout_id], "every answer that was seen is stored"
        names.update(call.info.call_id for call in calls)
        spans = await place.spans()
        assert len({span.span_id for span in spans}) == len(spans), "nothing is stored twice"
        assert {call.info.call_id for call in calls} <= {s.attributes["agentlightning.call_id"] for s in spans}
    assert set(site.engine.sampled) <= names, "nothing that was sampled is lost"


async def _until(condition: Any, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
