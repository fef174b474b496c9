"""Who is refused again and again waits, and nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from agentlightning.gateway import Gateway, RequestLimits
from agentlightning.gateway.routing.models import Provider
from agentlightning.keys import CLOSE
from agentlightning.net.backoff import Backoff, ObservedRequest
from agentlightning.rendering import RenderersRendering
from agentlightning.store import InMemoryLightningStore
from tests.gateway.conftest import Site, calculator
from tests.gateway.scripted import ScriptedEngine

ASK: Any = {"model": "policy", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 50}
REFUSED: Any = {**ASK, "stop": ["x"] * 100}
SECONDS = 0.4
"""That a refusal of a small request makes the next one wait, where `served` says nothing else."""


@asynccontextmanager
async def served(
    store: InMemoryLightningStore, rendering: RenderersRendering, seconds: float = SECONDS, **more: Any
) -> AsyncIterator[Site]:
    limits = RequestLimits(refused_wait=seconds / 0.0005)
    engine = ScriptedEngine(rendering, calculator)
    async with Gateway(store, engine, rendering, request_limits=limits, **more) as gateway:
        claimed = await store.start_rollout(input={})
        yield Site(store, engine, gateway, claimed.rollout_id, claimed.attempt.attempt_id)


async def post(site: Site, body: Any, path: str = "/chat/completions") -> int:
    headers = {"authorization": f"Bearer {site.key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{site.base_url}{path}", json=body) as answer,
    ):
        await answer.read()
        return answer.status


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_after_a_refusal_the_attempts_next_request_waits_and_anothers_does_not(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async with served(store, rendering) as site:
        assert await post(site, REFUSED) == 400
        began = now()
        first = asyncio.create_task(post(site, ASK))
        for _ in range(3):
            assert await post(await site.another(), ASK) == 200
        assert not first.done(), "the others went first"
        assert await first == 200
        assert now() - began >= SECONDS - 0.05


async def test_refusals_come_one_after_another(store: InMemoryLightningStore, rendering: RenderersRendering) -> None:
    async with served(store, rendering) as site:
        assert await post(site, REFUSED) == 400
        began = now()
        assert await asyncio.gather(*[post(site, REFUSED) for _ in range(3)]) == [400] * 3
        assert now() - began >= 3 * SECONDS - 0.05


async def test_after_one_that_is_answered_all_go_on(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async with served(store, rendering, 1.0) as site:
        assert await post(site, REFUSED) == 400
        async with asyncio.timeout(15):
            assert await asyncio.gather(*[post(site, ASK) for _ in range(40)]) == [200] * 40


@pytest.mark.slow
async def test_what_is_large_makes_the_next_wait_longer(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    """Bytes that came in, and the time that the process for large requests took."""
    async with served(store, rendering, 0.005) as site:  # ten times
        assert await post(site, {**ASK, "x": [1] * 150_000}) == 413
        began = now()
        assert await post(site, ASK) == 200
        assert now() - began >= 10 * 0.45e6 / 50e6 - 0.05, "0.45 MB at 50 MB/s"


async def test_a_request_that_waits_too_long_is_told_why(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async with served(store, rendering, 20.0, read_seconds=0.5) as site:
        assert await post(site, REFUSED) == 400
        assert await post(site, ASK) == 429
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(site.gateway.endpoint).port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {site.key}\r\n"
        head += "content-type: application/json\r\n"
        writer.write(f"{head}content-length: 1000000\r\n\r\n".encode())
        async with asyncio.timeout(10):  # it is told before it has sent its body, which nobody reads
            assert b" 429 " in await reader.readline()
        writer.close()


async def test_an_attempt_is_closed_at_once_whatever_its_agent_was_refused(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async with served(store, rendering, 20.0) as site:
        assert await post(site, REFUSED) == 400
        async with asyncio.timeout(10):
            key = site.gateway.key_for(site.rollout_id, site.attempt_id, (CLOSE,))
            async with (
                aiohttp.ClientSession(headers={"authorization": f"Bearer {key}"}) as session,
                session.post(f"{site.base_url}/close", json={}) as answer,
            ):
                assert answer.status == 200, await answer.text()


async def test_what_another_provider_refuses_is_not_ours(
    store: InMemoryLightningStore, rendering: RenderersRendering
) -> None:
    async with served(store, rendering) as elsewhere:
        refusing = Provider(model="nothing", base_url=elsewhere.base_url, api_key=elsewhere.key)
        async with served(store, rendering, 20.0, models={"judge": refusing}) as site, asyncio.timeout(10):
            assert await post(site, {**ASK, "model": "judge"}) == 404
            assert await post(site, ASK) == 200


# ---- the rules, without a server -------------------------------------------------------------------------------------


async def request(size: int = 0, status: int | None = 400, *, samples: bool = False) -> ObservedRequest:
    async def receive() -> Any:
        return {"type": "http.request", "body": b"x" * size}

    async def send(_: Any) -> None: ...

    watched = ObservedRequest(receive, send)
    await watched.receive()
    watched.samples = samples
    if status is not None:
        await watched.send({"type": "http.response.start", "status": status, "headers": []})
        await watched.send({"type": "http.response.body", "body": b""})
    return watched


async def waits(backoff: Backoff, owner: str) -> bool:
    """Whether the owner's next request would wait."""
    return await backoff.wait(await request(), owner, 0.01) is not None


@pytest.mark.parametrize(
    ("ended", "waiting"),
    [
        ({"status": 400}, True),
        ({"status": 413}, True),
        ({"status": 200}, False),
        ({"status": 503}, False),
        ({"status": None}, True),
        ({"status": None, "samples": True}, False),
        ({"status": 400, "samples": True}, True),
    ],
)
async def test_what_counts_as_refused(ended: Any, waiting: bool) -> None:
    """Also who hangs up before there is an answer, but for who ends the sampling of one."""
    backoff = Backoff(1000)
    one = await request(**ended)
    await backoff.wait(one, "a", 1)
    backoff.settle(one)
    assert await waits(backoff, "a") is waiting
    assert not await waits(backoff, "b")


async def test_seconds_of_the_process_count_once() -> None:
    backoff = Backoff(10)
    one, two = await request(), await request()
    for each in (one, two):
        await backoff.wait(each, "a", 1)
    backoff.charge("a", 2.0)
    backoff.settle(one)
    assert backoff._lines["a"].pause == pytest.approx(20.005)  # pyright: ignore[reportPrivateUsage]
    backoff.settle(two)
    assert backoff._lines["a"].pause == pytest.approx(0.005)  # pyright: ignore[reportPrivateUsage]
    assert backoff._lines["a"].until - now() <= 30  # pyright: ignore[reportPrivateUsage]


async def test_nobody_waits_longer_than_half_a_minute_between_two_requests() -> None:
    backoff = Backoff(10)
    one = await request()
    await backoff.wait(one, "a", 1)
    backoff.charge("a", 60.0)
    backoff.settle(one)
    assert backoff._lines["a"].pause == 30  # pyright: ignore[reportPrivateUsage]


async def test_a_call_from_before_the_refusal_ends_no_waiting() -> None:
    """Else slow calls that go well would let anything be refused at any pace."""
    backoff = Backoff(1000)
    slow, refused = await request(status=200), await request()
    await backoff.wait(slow, "a", 1)
    await backoff.wait(refused, "a", 1)
    await asyncio.sleep(0.001)
    backoff.settle(refused)
    backoff.settle(slow)
    assert await waits(backoff, "a")


async def test_who_need_not_wait_any_more_is_forgotten() -> None:
    backoff = Backoff(1e-3)
    for number in range(5000):
        one = await request()
        await backoff.wait(one, str(number), 1)
        backoff.settle(one)
        if number % 500 == 0:
            await asyncio.sleep(0.002)
    assert len(backoff._lines) <= 1024 + 500  # pyright: ignore[reportPrivateUsage]
