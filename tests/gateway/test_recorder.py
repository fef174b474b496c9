"""The recorder: what one attempt breaks is lost alone; what the store takes later is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from agentlightning.errors import StoreError, StoreUnavailableError
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import Span


class Picky(InMemoryLightningStore):
    """Refuses the spans of one name, and was away for the first requests."""

    away = 3

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        if self.away:
            self.away -= 1
            raise StoreUnavailableError("away")
        if any(span.name == "refused" for span in spans):
            raise StoreError("no")
        return await super().add_many_spans(spans)


async def test_one_refused_record_never_blocks_the_others() -> None:
    store = Picky()
    claims = [await store.start_rollout(n) for n in range(4)]
    lost: list[tuple[str, str, str]] = []
    recorder = Recorder(store, lambda *loss: lost.append(loss))
    recorder.start()
    for number, claim in enumerate(claims):
        name = "refused" if number == 1 else "fine"
        span = Span.from_attributes(
            rollout_id=claim.rollout_id, attempt_id=claim.attempt.attempt_id, name=name, attributes={}
        )
        recorder.put((claim.rollout_id, claim.attempt.attempt_id), lambda span=span: span)
    await recorder.barrier(30.0)
    found = [[span.name for span in await store.query_spans(claim.rollout_id)] for claim in claims]
    assert found == [["fine"], [], ["fine"], ["fine"]]
    late = Span.from_attributes(rollout_id="nobody", attempt_id="nobody", name="late", attributes={})
    recorder.put(("nobody", "nobody"), lambda: late)
    recorder.put(("nobody", "at all"), lambda: Span.from_attributes(rollout_id=1, name="broken"))  # pyright: ignore
    await recorder.barrier(30.0)
    refused = claims[1]
    assert {loss[:2] for loss in lost} == {
        (refused.rollout_id, refused.attempt.attempt_id),
        ("nobody", "nobody"),
        ("nobody", "at all"),
    }, "who lost a record is told, and nobody else"
    await recorder.stop(1.0)
    await store.close()
    await asyncio.sleep(0)


class Stuck(InMemoryLightningStore):
    """Takes nothing before it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await self.open.wait()
        return await super().add_many_spans(spans)


async def test_what_open_calls_will_put_counts_and_so_do_records_of_refusals() -> None:
    recorder = Recorder(InMemoryLightningStore(), lambda *_: None, capacity=100, share=10)
    one, other = ("ro-1", "at-1"), ("ro-2", "at-2")
    async with recorder.admitted(one, 8), recorder.admitted(one, 2):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), recorder.admitted(one):
                raise AssertionError("ten records are to come, as many as the attempt may have")
        async with asyncio.timeout(5), recorder.admitted(other, 50):
            pass  # more than the share at once, for who has nothing else
    span = Span.from_attributes(rollout_id=one[0], attempt_id=one[1], name="refused", attributes={})
    for _ in range(10):
        recorder.put(one, lambda: span)  # the recorder has not been started: nothing is written
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(recorder.wait_until_writable(one), 0.05)
    await asyncio.wait_for(recorder.wait_until_writable(other), 5)


async def test_an_attempt_with_too_much_unwritten_waits_alone() -> None:
    store = Stuck()
    greedy, modest = [(c.rollout_id, c.attempt.attempt_id) for c in [await store.start_rollout(n) for n in range(2)]]
    recorder = Recorder(store, lambda *loss: None, share=3)
    recorder.start()
    for number in range(3):
        span = Span.from_attributes(rollout_id=greedy[0], attempt_id=greedy[1], name=f"{number}", attributes={})
        recorder.put(greedy, lambda span=span: span)

    async def call(owner: tuple[str, str]) -> None:
        async with recorder.admitted(owner):
            pass

    waiting = asyncio.create_task(call(greedy))
    async with asyncio.timeout(10):
        await call(modest)
    assert not waiting.done()
    store.open.set()
    async with asyncio.timeout(10):
        await waiting
    await recorder.stop(1.0)
    await store.close()
