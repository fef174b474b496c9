"""Runners that reach the store over HTTP, and what they do when it is gone."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

import agentlightning as agl
from agentlightning.errors import StoreError
from agentlightning.gateway import Gateway, Provider
from agentlightning.runner import LitAgentRunner, remote
from agentlightning.runner.remote import Address, RemoteGateway, serve_rollouts
from agentlightning.store import InMemoryLightningStore, LightningStoreClient, LightningStoreServer
from agentlightning.tracer import OtelTracer

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
    gateway = Gateway(store, None, None, models={"none": Provider(base_url=ENDPOINT.endpoint)})
    await gateway.start()
    await store.add_resources({"llm": gateway.as_resource("none")})
    await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input="one"), agl.EnqueueRolloutRequest(input="two")])
    stop = asyncio.Event()
    running = asyncio.create_task(serve_rollouts(hangs, Address(server.endpoint, None), stop=stop, concurrency=2))
    await asyncio.wait_for(began.wait(), 20)
    await server.stop()
    await gateway.stop()
    await store.close()
    stop.set()
    asked = time.monotonic()
    await running
    assert time.monotonic() - asked < 20
    assert "given up" in caplog.text
    assert caplog.text.count("could not be finished") == 2


@pytest.mark.timeout(120)
async def test_what_finished_while_the_store_was_away_is_reported_when_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The outage is longer than the client's retries: the runner keeps its result and tells it later."""
    began, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    @agl.rollout
    async def waits(task: str) -> float:
        loop.call_soon_threadsafe(began.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))
        return 1.0

    store = InMemoryLightningStore()
    server = LightningStoreServer(store, port=0)
    await server.start()
    port = int(server.endpoint.rsplit(":", 1)[1])
    client = LightningStoreClient(server.endpoint, retry_seconds=0.3)
    runner = LitAgentRunner(OtelTracer(), 1, concurrency=1)
    runner.init(waits)
    runner.init_worker("w", client)
    rollout = await store.enqueue_rollout("task")
    running = asyncio.create_task(runner.iter())
    await asyncio.wait_for(began.wait(), 20)
    await server.stop()
    go_on.set()
    while "wait for the store" not in caplog.text:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    server = LightningStoreServer(store, port=port)
    await server.start()
    (ended,) = await store.wait_for_rollouts(rollout_ids=[rollout.rollout_id], timeout=60.0)
    assert ended.status is agl.RolloutStatus.SUCCEEDED
    await running
    runner.teardown()
    await client.close()
    await server.stop()
    await store.close()


async def test_a_gateway_out_of_reach_is_named_without_the_key_in_its_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CLOSE_SECONDS", 0.0)
    gateway = RemoteGateway(Address("http://127.0.0.1:9", "the store's key"))
    bound = gateway.bind(ENDPOINT, "ro-1", "at-1", ("calls",))
    key = bound.endpoint.split("/key/")[1].removesuffix("/v1")
    for ask in (gateway.open_attempt, gateway.close_attempt):
        with pytest.raises(StoreError, match="cannot be reached") as said:
            await ask("ro-1", "at-1")
        assert key not in str(said.value)
    await gateway.close()


async def test_attempts_that_wait_for_a_connection_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "CLOSE_SECONDS", 0.0)
    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(remote, "MAX_CONNECTIONS", 1)
    asked = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.1)
        return web.json_response({"instance": "one"})

    app = web.Application()
    app.router.add_get("/{rest:.*}", slow)
    site = web.AppRunner(app)
    await site.setup()
    await web.TCPSite(site, "127.0.0.1", 0).start()
    gateway = RemoteGateway(Address("http://127.0.0.1:9", "the store's key"))
    address = f"http://127.0.0.1:{site.addresses[0][1]}"
    for number in range(12):
        gateway.bind(ENDPOINT.model_copy(update={"endpoint": address}), f"ro-{number}", f"at-{number}", ("calls",))
    try:
        await asyncio.gather(*(gateway.open_attempt(f"ro-{n}", f"at-{n}") for n in range(12)))
        assert asked == 12
    finally:
        await gateway.close()
        await site.cleanup()
