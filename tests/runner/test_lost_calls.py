"""A gateway that dies with answers it has not stored: what its agents were given is in the store, or is done again."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import agentlightning as agl
from agentlightning.errors import GatewayError, StoreUnavailableError
from agentlightning.gateway import Gateway, load_rendering
from agentlightning.gateway.recording.journal import CallJournal
from agentlightning.keys import derived_secret
from agentlightning.models import resolve_model
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.store import InMemoryLightningStore, LightningStoreServer
from agentlightning.store.base import LightningStore
from agentlightning.types import CallRecord
from tests.gateway.scripted import ScriptedEngine

KEY = "the store's key"


class Held:
    """A store whose writes of calls never come to an end."""

    def __init__(self, store: LightningStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        await asyncio.Event().wait()


class Site:
    """A store with its server, and one gateway after another on the same port."""

    def __init__(self) -> None:
        self.store = InMemoryLightningStore()
        self.server = LightningStoreServer(self.store, port=0, admin_key=KEY)
        self.rendering = load_rendering(resolve_model("calc"))
        self.port = 0

    async def gateway(self, *, holds: bool = False, delay: float = 0.0, **more: Any) -> Gateway:
        store: Any = Held(self.store) if holds else self.store
        engine = ScriptedEngine(self.rendering, lambda *_: "It is 5.")
        engine.delay = delay
        gateway = Gateway(store, engine, self.rendering, secret=derived_secret(KEY), port=self.port, **more)
        await gateway.start()
        self.port = int(gateway.endpoint.rsplit(":", 1)[1].removesuffix("/v1"))
        return gateway

    async def run(self, agent: Any, rollouts: int) -> Sequence[agl.Rollout]:
        """Run an agent on so many tasks, to their ends."""
        enqueued = [await self.store.enqueue_rollout(number) for number in range(rollouts)]
        stop = asyncio.Event()
        running = asyncio.create_task(serve_rollouts(agent, Address(self.server.endpoint, KEY), stop=stop))
        ids = [rollout.rollout_id for rollout in enqueued]
        try:
            return await self.store.wait_for_rollouts(rollout_ids=ids, timeout=40.0)
        finally:
            stop.set()
            await running


async def check_whole(store: LightningStore, rollout: agl.Rollout, calls: int, outcomes: Sequence[str]) -> None:
    """The rollout succeeded, its last attempt has so many calls and no other has any, and they ended like this."""
    assert rollout.status == "succeeded"
    attempts = await store.query_attempts(rollout.rollout_id)
    assert [attempt.outcome for attempt in attempts] == list(outcomes)
    found = (await store.query_calls([rollout.rollout_id])).get(rollout.rollout_id, ())
    assert [call.info.attempt_id for call in found] == [attempts[-1].attempt_id] * calls


@pytest.fixture
async def place() -> Any:
    found = Site()
    await found.server.start()
    yield found
    await found.server.stop()
    await found.store.close()


async def ask(llm: agl.LLM, messages: list[Any]) -> Any:
    async with aiohttp.ClientSession() as session:
        body = {"model": llm.model, "messages": messages}
        async with session.post(f"{llm.endpoint}/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return (await answer.json())["choices"][0]["message"]


class Pausing:
    """What an agent does on a task: so many calls. Its first run waits before each, and at its end, to be let on."""

    def __init__(self, calls: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.calls, self.runs = calls, 0
        self.paused = [asyncio.Event() for _ in range(calls + 1)]
        self.go_on = [asyncio.Event() for _ in range(calls + 1)]

    async def run(self, llm: agl.LLM) -> float:
        self.runs += 1
        pauses, messages = self.runs == 1, [{"role": "user", "content": "What is 2 + 3?"}]
        for number in range(self.calls + 1):
            if pauses:
                self.loop.call_soon_threadsafe(self.paused[number].set)
                waits = self.go_on[number].wait()
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(waits, self.loop))
            if number < self.calls:
                messages += [await ask(llm, messages), {"role": "user", "content": "Sure?"}]
        return 1.0

    async def until_asked(self, calls: int) -> None:
        """Let the first run make so many calls."""
        for number in range(calls):
            self.go_on[number].set()
        await self.paused[calls].wait()

    def end(self) -> None:
        for event in self.go_on:
            event.set()


def agent_of(*pausing: Pausing) -> Any:
    """An agent that does on each task what is given for it."""

    @agl.rollout
    async def agent(task: int, llm: agl.LLM) -> float:
        return await pausing[task].run(llm)

    return agent


@pytest.mark.timeout(60)
@pytest.mark.parametrize("asked", [0, 1])
async def test_a_lost_last_answer_repeats_the_attempt(place: Site, asked: int) -> None:
    """Also where the agent had asked nothing yet: the gateway that comes after cannot tell the two apart."""
    pausing = Pausing(calls=1)
    gateway = await place.gateway(holds=True)
    await place.store.add_resources({"llm": gateway.as_resource()})
    running = asyncio.create_task(place.run(agent_of(pausing), 1))
    await pausing.until_asked(asked)
    await gateway.stop(timeout=0.0)
    gateway = await place.gateway()
    pausing.end()
    (rollout,) = await running
    await check_whole(place.store, rollout, 1, ["infra_error", "ok"])
    await gateway.stop()


@pytest.mark.timeout(60)
async def test_with_a_journal_only_attempts_that_lost_answers_are_repeated(place: Site, tmp_path: Path) -> None:
    """One attempt's answer is stored, another's is not; both go on at the gateway that comes after."""
    journal = tmp_path / "journal"
    stored, unstored = Pausing(calls=2), Pausing(calls=2)
    gateway = await place.gateway(journal=journal)
    await place.store.add_resources({"llm": gateway.as_resource()})
    running = asyncio.create_task(place.run(agent_of(stored, unstored), 2))
    await stored.until_asked(1)
    await unstored.until_asked(0)
    await gateway.stop()
    gateway = await place.gateway(holds=True, journal=journal)
    await unstored.until_asked(1)
    await gateway.stop(timeout=0.0)
    gateway = await place.gateway(journal=journal)
    stored.end()
    unstored.end()
    by_task = {rollout.input: rollout for rollout in await running}
    await check_whole(place.store, by_task[0], 2, ["ok"])
    await check_whole(place.store, by_task[1], 2, ["infra_error", "ok"])
    await gateway.stop()


def test_a_journal_says_who_lost_answers_until_they_are_stored(tmp_path: Path) -> None:
    path, one, two = tmp_path / "journal", ("ro-1", "at-1"), ("ro-2", "at-2")
    journal, other = CallJournal(path), CallJournal(path)
    instance, unstored = journal.open()
    assert not unstored
    journal.settle()
    for owner in (one, one, two, two):
        journal.hold(owner)
    journal.release([one, two, two])
    with pytest.raises(GatewayError, match="cannot be used"):
        other.open()
    journal.close()
    found, unstored = other.open()
    assert (found, list(unstored)) == (instance, [one])
    other.close()
    path.write_text('{"instance": "x", "boot": "another"}\n+["ro-1", "at-1"]\n')
    found, unstored = other.open()
    assert not unstored
    assert found not in (instance, "x"), "after a crash of the machine the file may lack notes"
    other.close()


def test_a_journal_stays_short_while_somebody_is_always_in_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, always = CallJournal(path), ("ro-0", "at-0")
    instance, _ = journal.open()
    journal.settle()
    journal.hold(always)
    for number in range(1, 20_000):
        owner = (f"ro-{number}", f"at-{number}")
        journal.hold(owner)
        journal.release([owner])
    assert path.stat().st_size < 2**18 + 100
    journal.close()
    found, unstored = CallJournal(path).open()
    assert (found, list(unstored)) == (instance, [always])


def test_who_comes_into_a_journal_as_it_is_shortened_stays_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, owners = tmp_path / "journal", [(f"ro-{number}", f"at-{number}") for number in range(20_000)]
    journal, replaced = CallJournal(path), []
    shorten = CallJournal._shorten  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(CallJournal, "_shorten", lambda self: (replaced.append(1), shorten(self)))
    journal.open()
    journal.settle()
    for owner in owners:
        journal.hold(owner)
    journal.close()
    _, unstored = CallJournal(path).open()
    assert list(unstored) == owners
    assert 1 <= len(replaced) <= 5, "and not at every line, where nothing can be left out"


def test_a_journal_on_a_full_disk_refuses_answers_and_stops_nothing(tmp_path: Path) -> None:
    """Files of this process may not grow: what a full disk does to the one."""
    path, one, two = tmp_path / "journal", ("ro-1", "at-1"), ("ro-2", "at-2")
    journal = CallJournal(path)
    instance, _ = journal.open()
    journal.settle()
    journal.hold(one)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, limits[1]))
    try:
        for _ in range(2):  # the first one leaves a part of its line
            with pytest.raises(StoreUnavailableError, match="disk full"):
                journal.hold(two)
        journal.hold(one)
        journal.release([one])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.close()
    found, _ = CallJournal(path).open()
    assert found != instance, "a damaged file vouches for nobody"


@pytest.mark.timeout(60)
async def test_a_stream_that_a_killed_gateway_cut_off_repeats_the_attempt(place: Site, tmp_path: Path) -> None:
    """The agent takes what it has heard for the answer."""
    runs: list[int] = []
    heard, go_on, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    @agl.rollout
    async def agent(task: Any, llm: agl.LLM) -> float:
        runs.append(task)
        body = {"model": llm.model, "messages": [{"role": "user", "content": "?"}], "stream": True}
        with suppress(aiohttp.ClientError):
            url = f"{llm.endpoint}/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
                async for _ in answer.content:
                    loop.call_soon_threadsafe(heard.set)
        if len(runs) == 1:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(go_on.wait(), loop))
        return 1.0

    gateway = await place.gateway(journal=tmp_path / "journal", delay=0.3)
    await place.store.add_resources({"llm": gateway.as_resource()})
    running = asyncio.create_task(place.run(agent, 1))
    await heard.wait()
    left = (tmp_path / "journal").read_bytes()  # what a kill at this moment leaves
    await gateway.stop()
    (tmp_path / "journal").write_bytes(left)
    gateway = await place.gateway(journal=tmp_path / "journal")
    go_on.set()
    (rollout,) = await running
    attempts = await place.store.query_attempts(rollout.rollout_id)
    assert [attempt.outcome for attempt in attempts] == ["infra_error", "ok"]
    await gateway.stop()
