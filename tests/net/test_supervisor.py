"""A helper process answers one conversation at a time, and never one with what belongs to another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from agentlightning.net import supervisor
from agentlightning.net.helper_process import HelperProcess
from agentlightning.net.supervisor import HelperLost, Supervisor

ECHO = "tests.net.echo"


def says(message: str, tenths: int = 0) -> Callable[[HelperProcess], Awaitable[str]]:
    async def conversation(process: HelperProcess) -> str:
        await process.send(message.encode(), [str(tenths).encode()])
        return (await process.receive()).decode()

    return conversation


@pytest.fixture
async def echo() -> AsyncIterator[Supervisor]:
    echo = Supervisor(ECHO, stop=b"stop")
    yield echo
    await echo.close()


async def test_it_is_started_once_and_again_when_it_has_died(echo: Supervisor) -> None:
    assert echo.pid is None
    assert await echo.run("a", says("one")) == "one"
    first = echo.pid
    assert await asyncio.gather(*(echo.run(owner, says(owner)) for owner in "abc")) == ["a", "b", "c"]
    assert echo.pid == first
    with pytest.raises(HelperLost, match="with exit code 3"):
        await echo.run("a", says("die"))
    assert await echo.run("a", says("two")) == "two"
    assert echo.pid not in (None, first)


@pytest.mark.quick_with("stopped-once-0", "killed-twice-100")
@pytest.mark.parametrize("steps", [0, 1, 3, 10, 100])
@pytest.mark.parametrize("cancelled", [1, 2], ids=["once", "twice"])
@pytest.mark.parametrize("stop", [b"stop", b""], ids=["stopped", "killed"])
async def test_an_answer_that_nobody_waits_for_is_not_the_next_ones(
    stop: bytes, steps: int, cancelled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Callers are cancelled before the process is there, while it starts, and while it answers; once and twice."""
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.05)
    echo = Supervisor(ECHO, stop=stop)
    try:
        for first in (f"{steps} steps", f"{steps} steps, started"):
            gone = asyncio.create_task(echo.run("a", says(first, tenths=5)))
            after = asyncio.create_task(echo.run("b", says("next")))
            for _ in range(steps):
                await asyncio.sleep(0.002)
            for _ in range(cancelled):
                gone.cancel()
                await asyncio.sleep(0)
            assert await after == "next"
            assert await echo.run("c", says("last")) == "last"
            with pytest.raises(asyncio.CancelledError):
                await gone
    finally:
        await echo.close()


async def test_one_that_is_told_to_stop_goes_on_living(echo: Supervisor) -> None:
    await echo.run("a", says("one"))
    pid = echo.pid
    gone = asyncio.create_task(echo.run("a", says("two", tenths=600)))
    await asyncio.sleep(0.1)
    gone.cancel()
    assert await echo.run("b", says("three")) == "three"
    assert echo.pid == pid


async def test_a_conversation_that_raises_ends_it(echo: Supervisor) -> None:
    async def unfinished(process: HelperProcess) -> None:
        await process.send(b"one")
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        await echo.run("a", unfinished)
    assert echo.pid is None
    assert await echo.run("a", says("two")) == "two"


async def test_its_end_ends_what_waits(echo: Supervisor) -> None:
    await echo.run("a", says("one"))
    waiting = [asyncio.create_task(echo.run(owner, says("two", tenths=600))) for owner in "ab"]
    await asyncio.sleep(0.05)
    await echo.close()
    for task in waiting:
        with pytest.raises(HelperLost):
            await task


async def test_one_that_cannot_be_started_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    echo = Supervisor(ECHO)
    with pytest.raises(OSError, match="No such file"):
        await echo.run("a", says("one"))
    await echo.close()


async def test_a_short_frame_waits_for_the_one_that_is_being_sent(echo: Supervisor) -> None:
    async def conversation(process: HelperProcess) -> str:
        sending = asyncio.create_task(process.send(b"long", [b"0" * 20_000_000]))
        await asyncio.sleep(0)
        process.send_soon(b"stop")
        await sending
        return (await process.receive()).decode()

    assert await echo.run("a", conversation) == "long"
