"""Clients that connect and say little: their connections end, are bounded in number, and disturb nobody."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest

from agentlightning.errors import ConfigError, GatewayError
from agentlightning.gateway import Gateway
from agentlightning.keys import CLOSE
from agentlightning.net.server import ConnectionLimits, LoopServer
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from tests.gateway.conftest import Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
DRIP = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\n"
DRIP += b"authorization: Bearer KEY\r\ncontent-length: 100\r\n\r\n{"


async def served(store: InMemoryLightningStore, rendering: RenderersRendering, limits: ConnectionLimits) -> Site:
    engine = ScriptedEngine(rendering, calculator)
    gateway = Gateway(store, engine, rendering, connection_limits=limits)
    await gateway.start()
    claimed = await store.start_rollout(input={})
    return Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


async def connect(site: Site) -> Connection:
    parts = urlsplit(site.gateway.endpoint)
    return await asyncio.open_connection(parts.hostname, parts.port)


async def rest_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection ends, which a client that is still writing sees as a reset."""
    with suppress(ConnectionResetError):
        return await reader.read()
    return b""


async def ask(site: Site) -> None:
    async with site.client() as client:
        await client.chat.completions.create(model="policy", messages=ASK)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat", b"GET /health HTTP/1.1\r\nx: "])
async def test_a_head_that_does_not_come_ends_the_connection(
    store: InMemoryLightningStore, rendering: RenderersRendering, said: bytes
) -> None:
    site = await served(store, rendering, ConnectionLimits(header_seconds=0.3))
    connections = [await connect(site) for _ in range(20)]
    for _, writer in connections:
        writer.write(said)
    async with asyncio.timeout(30):
        for reader, writer in connections:
            assert await reader.read() == b""
            writer.close()
    await ask(site)
    await site.gateway.stop()


async def test_dripping_a_second_head_ends_it_too(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    site = await served(store, rendering, ConnectionLimits(header_seconds=0.5))
    reader, writer = await connect(site)
    writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b'ok"}')
    closed = asyncio.create_task(rest_of(reader))
    async with asyncio.timeout(30):
        writer.write(b"GET /health HTTP/1.1\r\n")
        while not closed.done():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.05)
    assert await closed == b""
    writer.close()
    await site.gateway.stop()


async def test_requests_outlast_the_time_for_their_head(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    site = await served(store, rendering, ConnectionLimits(header_seconds=0.2))
    site.engine.delay = 0.8
    await ask(site)
    assert len(await site.close()) == 1
    await site.gateway.stop()


async def busy(site: Site) -> Connection:
    """A connection with a request of the attempt's under way."""
    reader, writer = await connect(site)
    body = json.dumps({"model": "policy", "messages": ASK}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: Bearer {site.key}\r\n"
    )
    before = len(site.engine.params)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    async with asyncio.timeout(30):
        while len(site.engine.params) == before:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return reader, writer


async def test_connections_are_bounded_and_the_limit_is_said(
    store: InMemoryLightningStore, rendering: RenderersRendering, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agentlightning.net.server")
    site = await served(store, rendering, ConnectionLimits(most=5, reserve=0, per_key=9))
    site.engine.open.clear()
    connections = [await busy(site) for _ in range(5)]
    for _ in range(3):
        reader, writer = await connect(site)
        assert b"503" in (await reader.read())[:20]
        writer.close()
    assert [record.args for record in caplog.records] == [("gateway", 5)], "said once"
    site.engine.open.set()
    for reader, writer in connections:
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        writer.close()
        await writer.wait_closed()
    await ask(site)
    await site.gateway.stop()


@pytest.mark.parametrize("said", [b"", b"POST /v1/chat", HEALTH, DRIP])
async def test_who_waits_longest_for_its_client_makes_place(
    store: InMemoryLightningStore, rendering: RenderersRendering, said: bytes
) -> None:
    """Clients that say nothing, drip, or keep a connection keep nobody out; requests under way are not ended."""
    site = await served(store, rendering, ConnectionLimits(most=8))
    site.engine.open.clear()
    reader, writer = await busy(site)
    dripping = [await connect(site) for _ in range(5)]
    for _, one in dripping:
        one.write(said)
        await one.drain()
    asked = [asyncio.create_task(ask(await site.another())) for _ in range(3)]
    async with asyncio.timeout(30):
        while len(site.engine.params) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ends = [asyncio.create_task(one.read()) for one, _ in dripping]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        assert ends[0] in done, "the first that came"
        site.engine.open.set()
        await asyncio.gather(*asked)
        assert b"200 OK" in await reader.readuntil(b"\r\n")
    for _, one in [*dripping, (reader, writer)]:
        one.close()
    await asyncio.gather(*ends, return_exceptions=True)
    await site.gateway.stop()


async def test_runners_and_health_are_answered_while_agents_take_all(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    site = await served(store, rendering, ConnectionLimits(most=8, reserve=2, per_key=8))
    site.engine.open.clear()
    connections = [await busy(site) for _ in range(6)]
    other = await site.another()
    with pytest.raises(openai.APIStatusError, match="503"):
        await ask(other)
    url, ids = site.gateway.endpoint, (other.rollout_id, other.attempt_id)
    close = {"authorization": f"Bearer {site.gateway.key_for(*ids, (CLOSE,))}"}
    async with aiohttp.ClientSession() as session:
        for _ in range(5):
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200
        base = site.gateway.as_resource().get_base_url(*ids)
        async with session.post(f"{base}/close", headers=close) as answer:
            assert answer.status == 200
    site.engine.open.set()
    for reader, writer in connections:
        assert b"200 OK" in await reader.readuntil(b"\r\n")
        writer.close()
    await site.gateway.stop()


async def test_one_key_does_not_take_all_connections(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    """Whether it lets its requests be answered, or drips their bodies."""
    site = await served(store, rendering, ConnectionLimits(most=8, reserve=2))
    site.engine.open.clear()
    _, answering = await busy(site)
    others = [await connect(site) for _ in range(2)]
    for _, writer in others:
        writer.write(DRIP.replace(b"KEY", site.key.encode()))
        await writer.drain()
    for path, body in (("/chat/completions", {"model": "policy", "messages": ASK}), ("/reward", {"reward": 1.0})):
        headers = {"authorization": f"Bearer {site.key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{site.base_url}{path}", json=body) as answer,
        ):
            assert (answer.status, "per_key" in await answer.text()) == (429, True)
    site.engine.open.set()
    await ask(await site.another())
    for _, writer in [*others, (None, answering)]:
        writer.close()
    await site.gateway.stop()


async def test_a_body_that_is_dripped_to_who_refused_it_ends(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    site = await served(store, rendering, ConnectionLimits(body_seconds=0.5))
    reader, writer = await connect(site)
    writer.write(
        b"POST /v1/close HTTP/1.1\r\nexpect: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n\r\n"
    )
    assert b"401" in await reader.readuntil(b"\r\n")
    closed = asyncio.create_task(rest_of(reader))
    async with asyncio.timeout(30):
        while not closed.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
    writer.close()
    await site.gateway.stop()


async def test_a_head_is_short(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    site = await served(store, rendering, ConnectionLimits())
    reader, writer = await connect(site)
    writer.write(b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 100_000)
    async with asyncio.timeout(30):
        assert b"431" in await reader.readuntil(b"\r\n")
    writer.close()
    await ask(site)
    await site.gateway.stop()


@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"2\r\n{}\r\n0\r\n", b"x: y\r\n"), (b"2\r\n{}\r\n0\r\nx: ", b"yyyyyyy"), (b"2;", b"xxxxxxx")],
    ids=["trailers", "one trailer", "chunk extension"],
)
async def test_what_is_between_and_behind_pieces_of_a_body_is_short(
    store: InMemoryLightningStore, rendering: RenderersRendering, begin: bytes, more: bytes
) -> None:
    """Trailers would be kept, of clients without a key, too."""
    site = await served(store, rendering, ConnectionLimits())
    reader, writer = await connect(site)
    head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + begin + more * 100_000)
    async with asyncio.timeout(30):
        assert b" 200 " not in await rest_of(reader)
    writer.close()
    await ask(site)
    await site.gateway.stop()


async def test_trailers_become_no_headers(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    site = await served(store, rendering, ConnectionLimits())
    reader, writer = await connect(site)
    writer.write(
        b"GET /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nhost: evil.example\r\n\r\n"
        b"GET /health HTTP/1.1\r\nconnection: close\r\n\r\n"
    )
    async with asyncio.timeout(30):
        assert (await rest_of(reader)).count(b"200 OK") == 2
    writer.close()
    await site.gateway.stop()


@pytest.mark.parametrize("name", ["most", "per_key", "reserve", "header_seconds", "body_seconds"])
def test_settings_that_mean_nothing_are_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=name):
        ConnectionLimits(**wrong)
    assert ConnectionLimits(most=100).unreserved == 75
    assert ConnectionLimits(most=1000).of_one_key == 484


def test_answers_are_sent_without_delay_on_every_event_loop() -> None:
    """asyncio's own loop turns the delay off where the socket says its protocol, and only there; uvloop always does."""
    server = LoopServer(lambda *_: asyncio.sleep(0), "127.0.0.1", 0, what="test", error=GatewayError)
    with server._bind() as listening:  # pyright: ignore[reportPrivateUsage]
        assert listening.proto == socket.IPPROTO_TCP
