"""Many pieces of one attempt's work do not come before another attempt's."""

from __future__ import annotations

import asyncio

from agentlightning.gateway.attempts import AT_ONCE, IN_A_ROW, PAUSE, Turns


async def test_one_attempt_does_not_run_ahead_of_another() -> None:
    done: list[str] = []
    greedy, modest = Turns(), Turns()

    async def piece(turns: Turns, name: str) -> None:
        await turns.take()
        done.append(name)

    many = [asyncio.create_task(piece(greedy, "greedy")) for _ in range(300)]
    one = asyncio.create_task(piece(modest, "modest"))
    await one
    assert len(done) <= AT_ONCE + 1
    await asyncio.gather(*many)
    assert done.count("greedy") == 300


async def test_a_turn_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    turns, done = Turns(), list[int]()

    async def piece(number: int) -> None:
        await turns.take()
        done.append(number)

    tasks = [asyncio.create_task(piece(number)) for number in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    for gone in tasks[AT_ONCE : 2 * AT_ONCE]:
        gone.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == [*range(AT_ONCE), *range(2 * AT_ONCE, 3 * AT_ONCE)]


async def test_whoever_is_alone_does_not_wait() -> None:
    turns = Turns()
    passes = 0

    def count() -> None:
        nonlocal passes
        passes += 1

    asyncio.get_running_loop().call_soon(count)
    for _ in range(AT_ONCE):
        await turns.take()
    assert passes == 0


async def test_who_goes_on_without_a_break_is_slowed_down() -> None:
    turns, loop = Turns(), asyncio.get_running_loop()

    async def seconds_of(pieces: int) -> float:
        began = loop.time()
        await asyncio.gather(*[turns.take() for _ in range(pieces)])
        return loop.time() - began

    rest = 10 * AT_ONCE
    assert await seconds_of(IN_A_ROW + rest) >= (rest / AT_ONCE - 2) * PAUSE
    await asyncio.sleep(2 * PAUSE)
    passes = 0

    def count() -> None:
        nonlocal passes
        passes += 1
        loop.call_soon(count)

    loop.call_soon(count)
    await seconds_of(IN_A_ROW)
    assert passes <= IN_A_ROW / AT_ONCE + 4, "after a break it is done in as many passes of the event loop as before"
