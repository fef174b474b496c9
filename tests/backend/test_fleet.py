"""A fleet whose replicas come and go: who is given requests, who waits, and when it is over."""

from __future__ import annotations

import asyncio

import pytest

from agentlightning.backend.fleet import Fleet
from agentlightning.errors import BackendDied, EngineError


class Replica:
    """Ready when it is told to be, and given up when it is told to."""

    def __init__(self, name: str, *, ready: bool = True) -> None:
        self.name = name
        self.running = 0
        self.publication_seconds = 0.0
        self.ready = asyncio.Event()
        self.given_up = asyncio.Event()
        if ready:
            self.ready.set()

    def lost(self, cause: BackendDied) -> None:
        self.ready.clear()

    async def run(self) -> None:
        await self.given_up.wait()
        self.ready.clear()
        raise EngineError(f"{self.name} gave up")


async def chosen(fleet: Fleet[Replica]) -> set[str]:
    """Who is given requests, of many owners."""
    return {(await fleet.pick(str(owner))).name for owner in range(100)}


def test_one_that_leaves_is_given_nothing_as_long_as_another_is_ready() -> None:
    async def run() -> None:
        one, two = Replica("one"), Replica("two")
        fleet = Fleet([one, two], 8)
        await fleet.start()
        assert await chosen(fleet) == {"one", "two"}
        fleet.leaving.add(one)
        assert await chosen(fleet) == {"two"}
        two.ready.clear()
        assert await chosen(fleet) == {"one"}, "better than none"
        two.ready.set()
        await fleet.remove(one)
        assert fleet.replicas == [two]
        assert await chosen(fleet) == {"two"}
        await fleet.close()

    asyncio.run(run())


def test_nobody_waits_for_a_full_one_while_another_is_not() -> None:
    async def run() -> None:
        one, two = Replica("one"), Replica("two")
        fleet = Fleet([one, two], 8)
        await fleet.start()
        mine = [str(owner) for owner in range(100) if await fleet.pick(str(owner)) is one][0]  # noqa: RUF015
        for busy, other, expected in ((7, 5, one), (8, 7, two), (8, 8, one), (10, 9, one), (14, 9, two)):
            one.running, two.running = busy, other
            assert await fleet.pick(mine) is expected, (busy, other)
        await fleet.close()

    asyncio.run(run())


def test_one_that_is_added_serves_who_waits() -> None:
    async def run() -> None:
        one = Replica("one")
        fleet = Fleet([one], 8)
        await fleet.start()
        one.ready.clear()
        waiting = asyncio.create_task(fleet.pick("owner"))
        await asyncio.sleep(0)
        two = Replica("two", ready=False)
        fleet.add(two)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        two.ready.set()
        assert await asyncio.wait_for(waiting, 30) is two
        await fleet.close()

    asyncio.run(run())


def test_a_fleet_is_over_when_all_have_given_up_that_are_there() -> None:
    async def run() -> str:
        one, two, three = Replica("one"), Replica("two"), Replica("three")
        fleet = Fleet([one, two], 8)
        await fleet.start()
        over = asyncio.ensure_future(fleet.watch())
        one.given_up.set()
        await asyncio.sleep(0.01)
        assert fleet.has_given_up(one)
        fleet.add(three)
        await fleet.remove(one)
        await fleet.remove(two)
        await asyncio.sleep(0.01)
        assert not over.done(), "one that was added is there"
        three.given_up.set()
        with pytest.raises(BackendDied) as died:
            await asyncio.wait_for(over, 30)
        return str(died.value)

    assert asyncio.run(run()) == "three gave up"
