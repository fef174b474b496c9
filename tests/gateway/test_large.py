"""Large requests are read and tokenised in a process of their own, with the same results; it may die."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agentlightning.gateway import Gateway, RequestLimits
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.limits import Waiting
from agentlightning.net.places import Places
from agentlightning.net.supervisor import Supervisor
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import SystemPrompt
from tests.gateway.conftest import CALC, Site, calculator
from tests.gateway.scripted import ScriptedEngine

USER: Any = {"role": "user", "content": "What is 2 + 3?"}
ASK: Any = {"model": "policy", "messages": [USER], "max_tokens": 50}
PADDING = {"metadata": {"padding": "x" * 200_000}}
"""Makes any request a large one."""


async def post(site: Site, path: str, body: Any) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {site.key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{site.base_url}{path}", data=io.BytesIO(data)) as answer,
    ):
        return answer.status, await answer.json()


def process_of(site: Site) -> Supervisor:
    return site.gateway._large.process.helper  # pyright: ignore[reportPrivateUsage]


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_lock_goes_round() -> None:
    places, served = Places(1), []

    async def work(owner: str) -> None:
        async with places.one(owner):
            served.append(owner)
            await asyncio.sleep(0)

    waiting = [asyncio.create_task(work(owner)) for owner in "aaabbc"]
    await asyncio.sleep(0)
    given_up = asyncio.create_task(work("d"))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(*waiting, given_up, return_exceptions=True)
    assert "".join(served) == "aabcab"
    await work("e")
    assert served[-1] == "e"


def test_what_waits_is_counted_by_attempt() -> None:
    waiting = Waiting(RequestLimits(body_bytes=1, waiting_bytes=10))
    waiting.hold("a", 9)
    with pytest.raises(Refusal, match="waiting_bytes"):
        waiting.hold("a", 2)
    waiting.hold("b", 10)
    waiting.release("a", 9)
    waiting.hold("a", 10)


async def test_large_requests_are_understood_as_small_ones_are(site: Site) -> None:
    resources = await site.store.add_resources({"prompt": SystemPrompt(template="Answer in a word.")})
    claimed = await site.store.start_rollout(input={}, resources_id=resources.resources_id)
    prompted = Site(site.store, site.engine, site.gateway, claimed.rollout_id, claimed.attempt.attempt_id)
    bodies: list[tuple[str, Site, Any]] = [
        ("/chat/completions", site, {**ASK, "stop": ["END", "FIN"], "tools": [CALC], "seed": 1}),
        ("/chat/completions", prompted, ASK),
        ("/messages", site, {**ASK, "system": "Be brief."}),
        ("/responses", site, {"model": "policy", "input": "What is 2 + 3?"}),
        ("/completions", site, {"model": "policy", "prompt": "What is"}),
    ]
    for path, place, body in bodies:
        for padding in ({}, {"user": "x" * 200_000} if path == "/completions" else PADDING):
            status, answer = await post(place, path, {**body, **padding})
            assert status == 200, (path, answer)
        small, large = site.engine.params[-2:]
        assert small.stop == large.stop
    prompts = [prompt.tolist() for prompt, _, _ in site.engine.sampled.values()]
    assert prompts[0::2] == prompts[1::2]
    assert "Answer in a word." in site.engine.rendering.decode(prompts[3])
    assert process_of(site).pid is not None

    first = await post(site, "/responses", {"model": "policy", "input": "What is 2 + 3?"})
    on = {"model": "policy", "input": "And then?", "previous_response_id": first[1]["id"], **PADDING}
    status, answer = await post(site, "/responses", on)
    assert status == 200, answer
    prompt = site.engine.rendering.decode(list(site.engine.sampled.values())[-1][0])
    assert prompt.index("What is 2 + 3?") < prompt.index("And then?")
    refused = [
        ("/responses", {**on, "previous_response_id": "resp_unknown"}, "previous_response_not_found"),
        ("/chat/completions", {**ASK, **PADDING, "model": "other"}, "model_not_found"),
        ("/chat/completions", {**ASK, **PADDING, "messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ]
    for path, body, named in refused:
        status, answer = await post(site, path, body)
        assert (status in (400, 404), named in json.dumps(answer)) == (True, True), answer
    _, small = await post(site, "/messages/count_tokens", {"messages": [USER]})
    _, large = await post(site, "/messages/count_tokens", {"messages": [USER], **PADDING})
    assert large == small

    text = "word, " * 2_000
    status, answer = await post(site, "/chat/completions", {**ASK, "messages": [{"role": "user", "content": text}]})
    assert (status, "prompt is too long" in json.dumps(answer)) == (400, True), "tokenised there, too"
    await site.close()


@pytest.fixture
async def hasty(store: InMemoryLightningStore, rendering: RenderersRendering) -> AsyncIterator[Site]:
    """A gateway that has little time for large requests."""
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, request_limits=RequestLimits(large_seconds=30)) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        assert (await post(site, "/chat/completions", {**ASK, **PADDING}))[0] == 200
        yield site


@pytest.mark.slow
async def test_a_process_that_dies_is_told_and_started_again(hasty: Site) -> None:
    process = process_of(hasty)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    asked = asyncio.create_task(post(hasty, "/chat/completions", {**ASK, **PADDING}))
    await until(lambda: process.is_busy)
    os.kill(first, signal.SIGKILL)
    status, answer = await asked
    assert (status, answer["error"]["code"]) == (503, "large_request_lost")
    assert (await post(hasty, "/chat/completions", {**ASK, **PADDING}))[0] == 200
    second = process.pid
    assert second is not None
    os.kill(second, signal.SIGKILL)  # while nobody asks
    await until(lambda: process.pid is None)
    assert (await post(hasty, "/chat/completions", {**ASK, **PADDING}))[0] == 200
    assert len({first, second, process.pid}) == 3


@pytest.mark.slow
async def test_nobody_waits_for_a_request_whose_client_is_gone(hasty: Site) -> None:
    process = process_of(hasty)
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    asked = asyncio.create_task(post(hasty, "/chat/completions", {**ASK, **PADDING}))
    await until(lambda: process.is_busy)
    asked.cancel()
    other = await hasty.another()
    assert (await post(other, "/chat/completions", {**ASK, **PADDING}))[0] == 200
    assert process.pid != first
    second = process.pid
    assert second is not None
    os.kill(second, signal.SIGSTOP)
    body = {**ASK, "metadata": {"padding": "x" * 8_000_000}}  # more than a socket holds
    asked = asyncio.create_task(post(hasty, "/chat/completions", body))
    await until(lambda: process.is_busy)
    asked.cancel()
    await asyncio.wait([asked])
    os.kill(second, signal.SIGCONT)
    assert (await post(other, "/chat/completions", {**ASK, **PADDING}))[0] == 200
    assert not process.is_busy


@pytest.mark.slow
async def test_work_that_takes_too_long_is_ended(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, request_limits=RequestLimits(large_seconds=1)) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        async with asyncio.timeout(60):
            while (await post(site, "/chat/completions", {**ASK, **PADDING}))[0] != 200:  # a slow machine
                pass
        pid = process_of(site).pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        status, answer = await post(site, "/chat/completions", {**ASK, **PADDING})
        assert (status, answer["error"]["code"]) == (413, "request_takes_too_long")


async def test_what_an_attempt_has_waiting_is_bounded(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    engine = ScriptedEngine(rendering, calculator)
    limits = RequestLimits(body_bytes=60_000, waiting_bytes=60_000)
    async with Gateway(store, engine, rendering, request_limits=limits) as gateway:
        claimed = await store.start_rollout(input={})
        site = Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.endpoint.split(":")[2].split("/")[0]))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {site.key}\r\n"
        head += "content-type: application/json\r\n"
        writer.write(f"{head}content-length: 50000\r\n\r\n{'x' * 49_000}".encode())
        waiting = gateway._app._waiting._held  # pyright: ignore[reportPrivateUsage]
        await until(lambda: sum(waiting.values()) == 49_000)
        body = {**ASK, "metadata": {"padding": "x" * 20_000}}
        status, answer = await post(site, "/chat/completions", body)
        assert (status, "waiting_bytes" in answer["error"]["message"]) == (429, True)
        assert (await post(await site.another(), "/chat/completions", body))[0] == 200
        writer.close()
        await until(lambda: not waiting)
        assert (await post(site, "/chat/completions", body))[0] == 200
        assert reader is not None


async def test_a_refused_body_is_read_in_pieces_and_then_answered(site: Site) -> None:
    port = int(site.gateway.endpoint.split(":")[2].split("/")[0])
    for key, length, status in ((site.key, 2**30, b"413"), ("wrong", 300_000, b"401")):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
        )
        if length > 300_000:  # it says so, and would take for ever; asked to wait, it is refused at once
            head += "expect: 100-continue\r\n"
        writer.write(f"{head}content-length: {length}\r\n\r\n".encode())
        if length <= 300_000:
            for _ in range(length // 1000):
                writer.write(b"x" * 1000)
                await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        assert status in answer.split(b"\r\n")[0], answer
        writer.close()
