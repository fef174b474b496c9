"""The recorder: calls go to the store in batches, off the request path.

The invariant: what was put is written, once, in the order it was put, or the loss is logged with its name and told, so
that its attempt does not count as whole. `put` never waits; `admitted` makes new calls wait while too much is
unwritten, so memory is bounded and nothing that was sampled is dropped. An attempt that asks for more than its share
waits for its own records, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from agentlightning.errors import StoreError, StoreUnavailableError
from agentlightning.gateway.recording.journal import CallJournal, Owner
from agentlightning.store.base import LightningStore
from agentlightning.types import CallRecord, Span
from agentlightning.types.finding import counted

logger = logging.getLogger(__name__)

Record = CallRecord | Span
Draft = Callable[[], Record]
"""Makes the record; called when it is written, so that a request does not wait for it."""
Lost = Callable[[str, str, str], None]
"""Is told the rollout, the attempt and the reason when a record will never be written."""

_AT_ONCE = 2
"""How many records are made before requests get a turn."""
_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0
_TRIES_FOR_BUGS = 5
"""How often a write is tried whose failure is neither the store's refusal nor its absence."""


class Recorder:
    """Writes drafts to the store from a task of its own."""

    def __init__(
        self,
        store: LightningStore,
        lost: Lost,
        journal: CallJournal | None = None,
        *,
        capacity: int = 2048,
        share: int = 256,
        batch_size: int = 32,
    ) -> None:
        """`capacity` records may be unwritten before further calls wait, and `share` of one attempt, together with
        those of its open calls."""
        self._store = store
        self._lost = lost
        self._journal = journal
        self._capacity = capacity
        self._share = share
        self._unwritten: Counter[Owner] = Counter()
        self._expected: Counter[Owner] = Counter()
        """Records of calls that have been admitted and go on."""
        self._batch_size = batch_size
        self._drafts: deque[tuple[Owner, Draft, bool]] = deque()
        self._put = 0
        self._written = 0
        self._work = asyncio.Event()
        self._moved = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="gateway-recorder")

    async def stop(self, timeout: float) -> None:
        """Write what is left, for at most `timeout` seconds; what then remains is logged as lost."""
        try:
            await self.barrier(timeout)
        except StoreError:
            logger.error("The gateway stops with %d calls that could not be stored.", self.backlog)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def backlog(self) -> int:
        """How many records are put but not written."""
        return self._put - self._written

    def is_full(self, owner: Owner) -> bool:
        """Whether as many records of the attempt are unwritten as its share."""
        return self._unwritten[owner] >= self._share

    async def wait_until_writable(self, owner: Owner) -> None:
        """Wait while it is full: for requests that may be refused, which is recorded too."""
        while self.is_full(owner):
            await self._next_move()

    @asynccontextmanager
    async def admitted(self, owner: Owner, records: int = 1) -> AsyncIterator[None]:
        """Answer a call in this context, and put its records: it begins when there is room for so many of them in the
        backlog and in the attempt's share of it."""
        while self.backlog >= self._capacity or not self._fits(owner, records):
            await self._next_move()
        if self._journal is not None:
            self._journal.hold(owner)
        self._expected[owner] += records
        try:
            yield
        finally:
            self._expected[owner] -= records
            if not self._expected[owner]:
                del self._expected[owner]
            if self._journal is not None:
                self._journal.release([owner])
            self._moved.set()

    def _fits(self, owner: Owner, records: int) -> bool:
        taken = self._unwritten[owner] + self._expected[owner]
        return not taken or taken + records <= self._share

    def put(self, owner: Owner, draft: Draft, *, large: bool = False) -> None:
        """Have a record written. One that is `large` is made beside the event loop."""
        if self._journal is not None:
            self._journal.hold(owner)
        self._drafts.append((owner, draft, large))
        self._unwritten[owner] += 1
        self._put += 1
        self._work.set()

    async def barrier(self, timeout: float) -> None:
        """Wait until everything put so far is written. Raises `StoreUnavailableError` after `timeout` seconds."""
        goal = self._put
        try:
            async with asyncio.timeout(timeout):
                while self._written < goal:
                    await self._next_move()
        except TimeoutError:
            raise StoreUnavailableError(
                f"{counted(goal - self._written, 'model call')} could not be stored within {timeout:g} s. Is "
                "the store reachable?"
            ) from None

    async def _next_move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            while self._drafts:
                batch = [self._drafts.popleft() for _ in range(min(len(self._drafts), self._batch_size))]
                await self._write(await self._made(batch))

    async def _made(self, drafts: Sequence[tuple[Owner, Draft, bool]]) -> list[Record]:
        records = []
        for number, (owner, draft, large) in enumerate(drafts):
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)  # requests go first
            try:
                records.append(await asyncio.to_thread(draft) if large else draft())
            except Exception as error:  # a record that cannot be made must not stop those behind it
                logger.exception("A call's record could not be made; the call is lost.")
                self._lost(*owner, f"The record of a call could not be made: {type(error).__name__}: {error}")
                self._advance([owner])
        return records

    async def _write(self, records: Sequence[Record]) -> None:
        pause, tries = _FIRST_PAUSE, 0
        while True:
            tries += 1
            try:
                await self._store_records(records)
                break
            except StoreUnavailableError as error:
                logger.warning("The store did not take %d calls (try %d): %s", len(records), tries, error)
            except StoreError as error:  # a refusal, which no retry changes
                await self._give_up_on(records, error)
                return
            except Exception as error:  # the recorder must outlive whatever a store raises, or every later call is lost
                logger.exception("Writing %d calls failed (try %d).", len(records), tries)
                if tries >= _TRIES_FOR_BUGS:
                    await self._give_up_on(records, error)
                    return
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE)
        self._advance([_owner(record) for record in records])

    async def _give_up_on(self, records: Sequence[Record], error: Exception) -> None:
        """The store refuses something in these records: write the others, drop and name the one."""
        if len(records) > 1:
            for record in records:
                await self._write([record])
            return
        rollout_id, attempt_id = owner = _owner(records[0])
        logger.error(
            "A call of attempt %s (rollout %s) is lost, the store refused it: %s", attempt_id, rollout_id, error
        )
        self._lost(rollout_id, attempt_id, f"The store refused the record of a call: {error}")
        self._advance([owner])

    async def _store_records(self, records: Sequence[Record]) -> None:
        calls = [r for r in records if isinstance(r, CallRecord)]
        spans = [r for r in records if isinstance(r, Span)]
        if calls:
            await self._store.add_calls(calls)
        if spans:
            await self._store.add_many_spans(spans)

    def _advance(self, owners: Sequence[Owner]) -> None:
        self._written += len(owners)
        for owner in owners:
            self._unwritten[owner] -= 1
            if not self._unwritten[owner]:
                del self._unwritten[owner]
        if self._journal is not None:
            self._journal.release(owners)
        self._moved.set()


def _owner(record: Record) -> Owner:
    span = record.span if isinstance(record, CallRecord) else record
    return span.rollout_id, span.attempt_id
