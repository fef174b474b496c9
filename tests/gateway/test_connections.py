"""Clients that connect and say little: their connections end, are bounded in number, and disturb nobody."""

from __future__ import annotations

import asyncio
import logging
import socket
from urllib.parse import urlsplit

import pytest

from agentlightning.errors import GatewayError
from agentlightning.gateway import Gateway
from agentlightning.rendering import RenderersRendering
from agentlightning.serving import ConnectionLimits, LoopServer
from agentlightning.store import InMemoryLightningStore
from tests.gateway.conftest import Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def served(store: InMemoryLightningStore, rendering: RenderersRendering, limits: ConnectionLimits) -> Site:
    engine = ScriptedEngine(rendering, calculator)
    gateway = Gateway(store, engine, rendering, connection_limits=limits)
    await gateway.start()
    claimed = await store.start_rollout(input={})
    return Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


async def connect(site: Site) -> Connection:
    parts = urlsplit(site.gateway.endpoint)
    return await asyncio.open_connection(parts.hostname, parts.port)


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
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b'ok"}')
    closed = asyncio.create_task(reader.read())
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


async def test_connections_are_bounded_and_the_limit_is_said(
    store: InMemoryLightningStore, rendering: RenderersRendering, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "agentlightning.serving")
    site = await served(store, rendering, ConnectionLimits(most=5))
    connections = [await connect(site) for _ in range(5)]
    for reader, writer in connections:  # they are in
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b'ok"}')
    for _ in range(3):
        reader, writer = await connect(site)
        assert b"503" in (await reader.read())[:20]
        writer.close()
    assert [record.args for record in caplog.records] == [("gateway", 5)], "said once"
    for _, writer in connections:
        writer.close()
        await writer.wait_closed()
    await ask(site)
    await site.gateway.stop()


def test_answers_are_sent_without_delay_on_every_event_loop() -> None:
    """asyncio's own loop turns the delay off where the socket says its protocol, and only there; uvloop always does."""
    server = LoopServer(lambda *_: asyncio.sleep(0), "127.0.0.1", 0, what="test", error=GatewayError)
    with server._bind() as listening:  # pyright: ignore[reportPrivateUsage]
        assert listening.proto == socket.IPPROTO_TCP
