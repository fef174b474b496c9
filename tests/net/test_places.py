"""Places at a provider: never more than there are, turns by attempt, and none is lost when a client goes away."""

from __future__ import annotations

import asyncio

from agentlightning.net.places import Places


async def test_attempts_that_wait_take_turns() -> None:
    places, order = Places(1), []
    first = asyncio.Event()

    async def call(owner: str, until: asyncio.Event | None = None) -> None:
        async with places.one(owner):
            order.append(owner)
            if until is not None:
                await until.wait()

    calls = [asyncio.create_task(call("greedy", first))]
    await asyncio.sleep(0)
    calls += [asyncio.create_task(call("greedy")) for _ in range(50)]
    await asyncio.sleep(0)
    calls += [asyncio.create_task(call("modest")) for _ in range(2)]
    await asyncio.sleep(0)
    first.set()
    await asyncio.gather(*calls)
    assert [order.index("modest"), len(order) - 1 - order[::-1].index("modest")] == [2, 4]
    assert len(order) == 53


async def test_no_place_is_lost_to_a_call_that_is_cancelled() -> None:
    places = Places(2)
    inside, most = 0, 0

    async def call(number: int) -> None:
        nonlocal inside, most
        async with places.one(number % 3):
            inside += 1
            most = max(most, inside)
            try:
                await asyncio.sleep(0.001 * (number % 4))
            finally:
                inside -= 1

    for _ in range(5):
        calls = [asyncio.create_task(call(number)) for number in range(40)]
        await asyncio.sleep(0.005)
        for task in calls[::3]:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert (inside, most) == (0, 2)
    async with asyncio.timeout(5), places.one("a"), places.one("b"):
        pass  # both places are still there
