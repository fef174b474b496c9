"""A provider that turns calls away: what the gateway records of it, and what the doctor makes of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

import agentlightning as agl
from agentlightning.doctor import Diagnosis, diagnose, gather
from agentlightning.gateway import Gateway
from agentlightning.litagent import LitAgent
from agentlightning.store import InMemoryLightningStore
from tests.algorithm.test_stall import waiting_for

ANSWER = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}"


@asynccontextmanager
async def busy() -> AsyncIterator[str]:
    """The base URL of a provider that answers 429."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


async def asks(llm: agl.LLM) -> None:
    async with httpx.AsyncClient(timeout=30, headers={"authorization": f"Bearer {llm.api_key}"}) as client:
        body = {"model": llm.model, "messages": [{"role": "user", "content": "hi"}]}
        (await client.post(f"{llm.endpoint}/chat/completions", json=body)).raise_for_status()


async def diagnosed(agent: LitAgent[Any], folder: Path) -> Diagnosis:
    """Two rollouts of the agent, run to their end through a gateway in front of that provider."""
    store = InMemoryLightningStore()
    async with (
        busy() as url,
        Gateway(store, None, None, models={"far": agl.Provider(base_url=url)}) as gateway,
        waiting_for(agent, folder, gateway, store) as (_, ids, _listener),
    ):
        async with asyncio.timeout(60):
            while len(await store.wait_for_rollouts(rollout_ids=ids, timeout=1.0)) < len(ids):
                pass
        return diagnose(await gather(store))


@pytest.mark.timeout(90)
async def test_an_agent_that_catches_the_error_is_told(tmp_path: Path) -> None:
    @agl.rollout
    async def agent(task: Any, llm: agl.LLM) -> float:
        try:
            await asks(llm)
        except httpx.HTTPStatusError:
            return 0.0
        return 1.0

    first = (await diagnosed(agent, tmp_path)).findings[0]
    assert (first.code, first.severity) == ("calls_fail_unseen", "problem")
    assert "429" in first.words
    assert "lower concurrency" in first.fix
    assert "Let the agent raise" in first.fix


@pytest.mark.slow
@pytest.mark.timeout(90)
async def test_an_agent_that_raises_fails_and_is_tried_again(tmp_path: Path) -> None:
    @agl.rollout
    async def agent(task: Any, llm: agl.LLM) -> float:
        await asks(llm)
        return 1.0

    first = (await diagnosed(agent, tmp_path)).findings[0]
    assert first.code == "rollouts_fail"
    assert "answered 429" in first.words
    assert "lower concurrency" in first.fix
