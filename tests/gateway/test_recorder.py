"""The recorder: what one attempt breaks is lost alone; what the store takes later is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
    recorder = Recorder(store)
    recorder.start()
    for number, claim in enumerate(claims):
        name = "refused" if number == 1 else "fine"
        span = Span.from_attributes(
            rollout_id=claim.rollout_id, attempt_id=claim.attempt.attempt_id, name=name, attributes={}
        )
        recorder.put(lambda span=span: span)
    await recorder.barrier(30.0)
    found = [[span.name for span in await store.query_spans(claim.rollout_id)] for claim in claims]
    assert found == [["fine"], [], ["fine"], ["fine"]]
    recorder.put(lambda: Span.from_attributes(rollout_id="nobody", attempt_id="nobody", name="late", attributes={}))
    await recorder.barrier(30.0)
    await recorder.stop(1.0)
    await store.close()
    await asyncio.sleep(0)
