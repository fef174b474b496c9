"""The HTTP server of all our servers: how it ends."""

from __future__ import annotations

import asyncio
import gc
import time

import pytest
from starlette.types import Receive, Scope, Send

from agentlightning.errors import GatewayError
from agentlightning.net.server import LoopServer


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def started() -> LoopServer:
    server = LoopServer(answers, "127.0.0.1", 0, what="server", error=GatewayError)
    await server.start()
    return server


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # asyncio drops sockets that it accepts as their server closes
async def test_connections_that_are_made_as_it_ends_end_with_it() -> None:
    """Also those that were accepted in the very moment."""
    for turns in range(60):
        server = await started()
        running = server._server  # pyright: ignore[reportPrivateUsage]
        made = [asyncio.create_task(asyncio.open_connection("127.0.0.1", server.port)) for _ in range(20)]
        for _ in range(turns % 6):
            await asyncio.sleep(0)
        await server.stop()
        found = await asyncio.gather(*made, return_exceptions=True)
        await asyncio.sleep(0.002)
        assert running is not None
        assert not running.server_state.connections
        for one in found:
            if not isinstance(one, BaseException):
                one[1].close()
                await asyncio.gather(one[1].wait_closed(), return_exceptions=True)
    gc.collect()  # what asyncio dropped belongs to no later test


async def test_one_that_nobody_uses_ends_at_once() -> None:
    times: list[float] = []
    for _ in range(5):
        server = await started()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        began = time.monotonic()
        await server.stop()
        times.append(time.monotonic() - began)
        writer.close()
    assert min(times) < 0.1, "uvicorn pauses twice for so long"
