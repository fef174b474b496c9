"""What the small trainer's server cannot take is refused in words, and nothing of it opens without the key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent_lightning.server import create_app
from agent_lightning.settings import Settings
from agent_lightning.trainings import Trainings
from agentlightning.errors import AgentLightningError
from agentlightning.net.server import LoopServer

KEY = "agl-a-key-of-the-tests"
JSON = {"content-type": "application/json"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[str]:
    app: Any = create_app(Trainings(Settings(), "127.0.0.1", tmp_path), KEY)
    front = LoopServer(app, "127.0.0.1", 0, what="server", error=AgentLightningError)
    await front.start()
    try:
        yield f"http://127.0.0.1:{front.port}"
    finally:
        await front.stop()


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/data", b"[1]", 422, "no JSON object"),
        ("/data", b"{", 422, "no JSON object"),
        ("/data", b"\xff", 422, "no JSON object"),
        ("/data", b'{"a":' + b"[" * 100_000, 422, "no JSON object"),
        ("/data", b"{}", 400, "no training tasks"),
        ("/data", b"", 400, "no training tasks"),
        ("/data", b'{"train": "abc"}', 422, "`train` is no list"),
        ("/train", b"{}", 400, "Say who asks"),
        ("/train", b'{"client": "a", "max_retries": "x"}', 422, "`max_retries` is no number"),
        ("/evaluate", b'{"client": "a", "timeout": [1]}', 422, "`timeout` is no number"),
        ("/evaluate", b'{"client": "a", "tasks": {"a": 1}}', 422, "`tasks` is no list"),
        ("/status", b'{"client": "a", "wait": "long"}', 422, "`wait` is no number"),
        ("/leave", b"{}", 400, "Say who asks"),
        ("/nowhere", b"{}", 404, "Not Found"),
    ],
)
async def test_it_is_refused_in_words(server: str, path: str, body: bytes, status: int, words: str) -> None:
    headers = {**JSON, "authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession() as session, session.post(server + path, data=body, headers=headers) as answer:
        assert (answer.status, words in (await answer.json())["detail"]) == (status, True), await answer.text()


@pytest.mark.parametrize("path", ["/data", "/train", "/evaluate", "/status", "/leave", "/stop", "/checkpoint"])
async def test_nothing_is_open_without_the_key(server: str, path: str) -> None:
    async with aiohttp.ClientSession() as session, session.post(server + path, json={"client": "a"}) as answer:
        assert (answer.status, "needs its key" in (await answer.json())["detail"]) == (401, True)
