"""Runners that reach the store over HTTP, and what they do when it is gone."""

from __future__ import annotations

import asyncio
import time

import pytest

import agentlightning as agl
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.store import InMemoryLightningStore, LightningStoreServer

ENDPOINT = agl.ProxyLLM(endpoint="http://127.0.0.1:9", model="none")  # nobody answers there


@pytest.mark.timeout(60)
async def test_a_stopped_runner_does_not_wait_for_a_store_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    @agl.rollout
    async def hangs(task: str, llm: agl.LLM) -> float:
        loop.call_soon_threadsafe(began.set)
        await asyncio.sleep(3600)
        return 1.0

    store = InMemoryLightningStore()
    server = LightningStoreServer(store, port=0)
    await server.start()
    await store.add_resources({"llm": ENDPOINT})
    await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input="one"), agl.EnqueueRolloutRequest(input="two")])
    stop = asyncio.Event()
    running = asyncio.create_task(serve_rollouts(hangs, Address(server.endpoint, None), stop=stop, concurrency=2))
    await asyncio.wait_for(began.wait(), 20)
    await server.stop()
    await store.close()
    stop.set()
    asked = time.monotonic()
    await running
    assert time.monotonic() - asked < 20
    assert "given up" in caplog.text
    assert caplog.text.count("could not be finished") == 2
