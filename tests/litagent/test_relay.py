"""Programs in sandboxes open connections as they like; what those take of the machine is bounded."""

from __future__ import annotations

import asyncio
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from agentlightning.litagent.bubblewrap import INSIDE, Passage

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """What is at the end of the connections."""

    def __init__(self) -> None:
        self.open = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        with suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()
        self.open -= 1

    async def until_all_are_closed(self) -> None:
        while self.open:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Whether a connection is passed on."""
    with suppress(ConnectionError):
        writer.write(b"x")
        return await reader.read(1) == b"x"
    return False


async def until_answered(connect: Callable[[], Awaitable[Connection]]) -> None:
    while True:
        with suppress(ConnectionError):
            reader, writer = await connect()
            answered = await answers(reader, writer)
            writer.close()
            if answered:
                return
        await asyncio.sleep(0.05)


async def test_no_sandbox_takes_all_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.litagent.bubblewrap.file_descriptors", lambda: 32)
    echo = Echo()
    gateway = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = gateway.sockets[0].getsockname()[1]
    greedy = await asyncio.start_unix_server(Passage("127.0.0.1", port), tmp_path / "greedy")
    modest = await asyncio.start_unix_server(Passage("127.0.0.1", port), tmp_path / "modest")
    async with asyncio.timeout(30):
        many = [await asyncio.open_unix_connection(tmp_path / "greedy") for _ in range(4)]
        assert [await answers(*connection) for connection in many] == [True, True, False, False]
        other = await asyncio.open_unix_connection(tmp_path / "modest")
        assert await answers(*other)
        for _, writer in many:
            writer.close()
        await until_answered(lambda: asyncio.open_unix_connection(tmp_path / "greedy"))
        other[1].close()
        await echo.until_all_are_closed()
    for server in (greedy, modest, gateway):
        server.close()


async def test_a_program_that_used_up_its_files_reaches_its_endpoint_again(tmp_path: Path) -> None:
    echo = Echo()
    gateway = await asyncio.start_unix_server(echo, tmp_path / "gateway")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    relay = subprocess.Popen(  # noqa: ASYNC220 (it begins at once)
        [sys.executable, "-I", "-S", INSIDE, "-", tmp_path, tmp_path / "gateway", str(port), "sleep", "60"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24)),
    )
    try:
        async with asyncio.timeout(30):
            await until_answered(lambda: asyncio.open_connection("127.0.0.1", port))
            many = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
            for connection in many[:5]:
                assert await answers(*connection)
            await asyncio.sleep(0.5)
            for _, writer in many:
                writer.close()
            await until_answered(lambda: asyncio.open_connection("127.0.0.1", port))
            await echo.until_all_are_closed()
    finally:
        relay.kill()
        relay.wait()
    gateway.close()
