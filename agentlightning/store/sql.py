"""The store on SQL: the protocol of `base` as operations on a database, with waits on one notifier.

The operations are in `rollouts`, `attempts`, `spans`, `calls`, `resources`, `workers` and `query`; here is what they
are called with, and whether they go to the writer or to a reader.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, Unpack

from agentlightning.errors import StoreError
from agentlightning.store import queries
from agentlightning.store.base import UNSET, Capabilities, LightningStore, Statistics, Unset
from agentlightning.store.database import counters
from agentlightning.store.database.jobs import JobTurn
from agentlightning.store.database.notify import Notifier
from agentlightning.store.database.transaction import Transaction, TransactionOperation
from agentlightning.store.given import Given, takes
from agentlightning.store.operations import (
    attempts,
    calls,
    query,
    query as searches,
    resources as named_resources,
    retention,
    rollouts,
    runs,
    spans as span_rows,
    workers,
)
from agentlightning.store.operations.codec import checked_id, new_id
from agentlightning.store.operations.watchdog import release
from agentlightning.store.queries import (
    PageKeywords,
    ResourcesKeywords,
    RolloutKeywords,
    RunEventKeywords,
    RunKeywords,
    SpanKeywords,
    WorkerKeywords,
)
from agentlightning.store.transfer import records as transfer
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Call,
    CallRecord,
    EnqueueRolloutRequest,
    NamedResources,
    Outcome,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutRecord,
    RolloutStatus,
    Run,
    RunEvent,
    RunStatus,
    Span,
    Worker,
)

T = TypeVar("T")
_call = functools.partial

IN_ORDER = "enqueued"
"""The lane of what is enqueued: it is claimed in the order in which it came."""
LATE_SECONDS = 1.0
"""How long after a claim its answer may be given without a new lease."""


class Database(Protocol):
    """Where operations run; see `sqlite` for what a database promises."""

    def write(
        self,
        operation: TransactionOperation[T],
        undo: Callable[[T], None] | None = None,
        rollout_ids: Collection[str] = (),
        turn: JobTurn = JobTurn.OTHER,
        lane: str | None = None,
    ) -> asyncio.Future[T]: ...

    def read(self, operation: TransactionOperation[T]) -> asyncio.Future[T]: ...

    async def close(self) -> None: ...


class SqlLightningStore(LightningStore):
    """A `LightningStore` on a database. Use `SqliteLightningStore` or `InMemoryLightningStore`."""

    def __init__(self, open_database: Callable[[Notifier], Database], capabilities: Capabilities):
        self._notifier = Notifier()
        self._db = open_database(self._notifier)
        self._capabilities = capabilities
        self._opened = time.monotonic()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def statistics(self) -> Statistics:
        uptime = time.monotonic() - self._opened
        return await self._db.read(lambda tx: counters.statistics(tx, type(self).__name__, uptime))

    def otlp_traces_endpoint(self) -> str:
        raise StoreError("This store has no server; wrap it in LightningStoreServer to receive OTLP traces.")

    async def close(self) -> None:
        await self._db.close()

    # ---- rollouts and attempts -------------------------------------------------------------------------------------

    @takes(LightningStore.start_rollout)
    async def start_rollout(self, given: Given) -> AttemptedRollout:
        worker_id, attempt_id = given.pop("worker_id", None), given.pop("attempt_id", None)
        new = rollouts.prepare(EnqueueRolloutRequest(**given))
        return await self._db.write(lambda tx: rollouts.start(tx, new, worker_id, attempt_id))

    @takes(LightningStore.enqueue_rollout)
    async def enqueue_rollout(self, given: Given) -> Rollout:
        new = rollouts.prepare(EnqueueRolloutRequest(**given))
        return await self._db.write(lambda tx: rollouts.create(tx, new), lane=IN_ORDER)

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        new = [rollouts.prepare(request) for request in requests]
        return await self._db.write(lambda tx: [rollouts.create(tx, one) for one in new], lane=IN_ORDER)

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        attempt_ids: Sequence[str] | None = None,
        run_id: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        if limit < 1:
            raise StoreError(f"limit must be at least 1, not {limit}.")
        if attempt_ids is not None and len(set(attempt_ids)) < limit:
            raise StoreError(f"attempt_ids must name as many different attempts as the limit, {limit}.")
        operation = _call(rollouts.claim, limit=limit, worker_id=worker_id, attempt_ids=attempt_ids, run_id=run_id)
        claim = _call(self._claimed, operation, worker_id, min(attempt_ids or (), default=None))
        end = time.monotonic() + timeout
        claims = await claim()
        if claims or timeout <= 0:
            return claims
        with self._notifier.claimer(run_id) as waiter:
            while True:
                claims = await claim()
                if claims or not await waiter.wait(end - time.monotonic()):
                    return claims
                self._notifier.again(waiter)

    async def _claimed(
        self, operation: TransactionOperation[list[AttemptedRollout]], worker_id: str | None, lane: str | None
    ) -> list[AttemptedRollout]:
        """Leases begin when claims are made; where it took long until they are answered, they begin anew."""
        claims = await self._db.write(operation, self._give_back, turn=JobTurn.CLAIM, lane=lane)
        if claims and worker_id is not None:
            last_sign = min(claim.attempt.last_heartbeat_time or 0.0 for claim in claims)
            if time.time() - last_sign > LATE_SECONDS:
                held = [claim.attempt.attempt_id for claim in claims]
                renewed = self._db.write(workers.Heartbeat(worker_id, attempt_ids=held), turn=JobTurn.ALIVE)
                renewed.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it
        return claims

    def _give_back(self, claims: list[AttemptedRollout]) -> None:
        """Undo claims whose caller was cancelled while they were on their way."""
        for rollout in claims:
            attempt = rollout.attempt
            last_sign = attempt.last_heartbeat_time
            self._db.write(
                _call(
                    rollouts.unclaim, rollout_id=rollout.rollout_id, attempt_id=attempt.attempt_id, last_sign=last_sign
                ),
                rollout_ids=[rollout.rollout_id],
            )

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, attempt_id: str | None = None
    ) -> AttemptedRollout:
        return await self._db.write(
            lambda tx: rollouts.start_attempt(tx, rollout_id, worker_id, attempt_id), rollout_ids=[rollout_id]
        )

    @takes(LightningStore.update_rollout)
    async def update_rollout(self, given: Given) -> Rollout:
        rollout_id, status = given.pop("rollout_id"), given.pop("status", UNSET)
        new, changes = status if status is UNSET else RolloutStatus(status), rollouts.changed_columns(**given)
        return await self._db.write(
            lambda tx: rollouts.update_rollout(tx, rollout_id, new, changes), rollout_ids=[rollout_id]
        )

    @takes(LightningStore.update_attempt)
    async def update_attempt(self, given: Given) -> Attempt:
        rollout_id, attempt_id = given.pop("rollout_id"), given.pop("attempt_id")
        for name, kind in (("status", AttemptStatus), ("outcome", Outcome)):
            if name in given:
                given[name] = kind(given[name])
        change = attempts.AttemptChange(**given)
        return await self._db.write(
            lambda tx: attempts.update_attempt(tx, rollout_id, attempt_id, change), rollout_ids=[rollout_id]
        )

    async def query_rollouts(self, **query: Unpack[RolloutKeywords]) -> PaginatedResult[Rollout]:
        wanted = queries.make(queries.RolloutQuery, query)
        return await self._db.read(lambda tx: searches.query_rollouts(tx, wanted))

    async def list_rollouts(self, **query: Unpack[RolloutKeywords]) -> PaginatedResult[searches.ListedRollout]:
        """As `query_rollouts`, a little of each, for people who look through them; `total` is -1 on full pages."""
        wanted = queries.make(queries.RolloutQuery, query)
        return await self._db.read(lambda tx: searches.list_rollouts(tx, wanted))

    async def count_rollouts(self, at_most: int = 2**31, **query: Unpack[RolloutKeywords]) -> int:
        """How many rollouts a query finds, as far as `at_most`."""
        wanted = queries.make(queries.RolloutQuery, query)
        return await self._db.read(lambda tx: searches.count_rollouts(tx, wanted, at_most))

    async def query_attempts(self, rollout_id: str, **query: Unpack[PageKeywords]) -> PaginatedResult[Attempt]:
        wanted = queries.make(queries.AttemptQuery, query)
        return await self._db.read(lambda tx: searches.query_attempts(tx, rollout_id, wanted))

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        return await self._db.read(lambda tx: rollouts.read(tx, rollout_id))

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, timeout, any_of=False)

    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, timeout, any_of=True)

    async def _wait(self, rollout_ids: Sequence[str], timeout: float | None, *, any_of: bool) -> Sequence[Rollout]:
        ids = list(dict.fromkeys(rollout_ids))
        if not ids:
            return []
        end = None if timeout is None else time.monotonic() + timeout
        with self._notifier.watcher(ids, any_of=any_of) as waiter:
            while True:
                finished = await self._db.read(lambda tx: rollouts.read_finished(tx, ids))
                left = None if end is None else end - time.monotonic()
                if len(finished) == len(ids) or (any_of and finished) or (left is not None and left <= 0):
                    return finished
                self._notifier.forget(waiter, [rollout.rollout_id for rollout in finished])
                await waiter.wait(left)

    # ---- spans and calls -------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        stored = await self.add_many_spans([span])
        return stored[0] if stored else None

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        numbers = await self.add_span_rows([span_rows.to_values(span) for span in spans])
        return [
            span if span.sequence_id == number else span.model_copy(update={"sequence_id": number})
            for span, number in zip(spans, numbers, strict=True)
            if number
        ]

    async def add_span_rows(self, rows: Sequence[dict[str, Any]]) -> Sequence[int]:
        """As `add_many_spans`, of spans as their columns; the number of each, or 0 for one that was there already."""
        touched = {row["rollout_id"] for row in rows}
        return await self._db.write(lambda tx: span_rows.add(tx, rows), rollout_ids=touched)

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        wanted = list(rollout_attempt_ids)
        return await self._db.write(
            lambda tx: [span_rows.next_sequence_id(tx, *pair) for pair in wanted],
            rollout_ids={rollout_id for rollout_id, _ in wanted},
        )

    async def query_spans(
        self, rollout_id: str, attempt_id: str | Literal["latest"] | None = None, **query: Unpack[SpanKeywords]
    ) -> PaginatedResult[Span]:
        wanted = queries.make(queries.SpanQuery, {"rollout_id": rollout_id, "attempt_id": attempt_id, **query})
        return await self._db.read(lambda tx: searches.query_spans(tx, wanted))

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        rows = [calls.to_rows(record) for record in records]
        if rows:
            touched = {record.span.rollout_id for record in records}
            await self._db.write(lambda tx: calls.add(tx, rows), rollout_ids=touched)

    async def query_calls(
        self, rollout_ids: Sequence[str], *, latest_attempt_only: bool = True
    ) -> dict[str, Sequence[Call]]:
        def read(tx: Transaction) -> dict[str, Sequence[Call]]:
            return calls.assemble(calls.fetch(tx, rollout_ids, latest_attempt_only), rollout_ids)

        return await self._db.read(read)

    async def fetch_calls(self, rollout_ids: Sequence[str], *, latest_attempt_only: bool = True) -> calls.CallTable:
        """What `query_calls` is made from; smaller, for a wire."""
        return await self._db.read(lambda tx: calls.fetch(tx, rollout_ids, latest_attempt_only))

    async def query_records(self, rollout_ids: Sequence[str]) -> Sequence[RolloutRecord]:
        return query.assemble(await self.fetch_records(rollout_ids))

    async def fetch_records(self, rollout_ids: Sequence[str]) -> query.RecordTable:
        """What `query_records` is made from."""
        return await self._db.read(lambda tx: query.fetch(tx, rollout_ids))

    # ---- resources and workers -------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        text = named_resources.encode_resources(resources)
        named = checked_id(resources_id, "A resources_id") if resources_id else new_id("rs")
        return await self._db.write(lambda tx: named_resources.add(tx, named, text))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        text = named_resources.encode_resources(resources)
        named = checked_id(resources_id, "A resources_id")
        return await self._db.write(lambda tx: named_resources.replace(tx, named, text))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._db.read(lambda tx: named_resources.read(tx, resources_id))

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._db.read(named_resources.read_latest)

    async def query_resources(self, **query: Unpack[ResourcesKeywords]) -> PaginatedResult[ResourcesUpdate]:
        wanted = queries.make(queries.ResourcesQuery, query)
        return await self._db.read(lambda tx: searches.query_resources(tx, wanted))

    async def query_workers(self, **query: Unpack[WorkerKeywords]) -> PaginatedResult[Worker]:
        wanted = queries.make(queries.WorkerQuery, query)
        return await self._db.read(lambda tx: searches.query_workers(tx, wanted))

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._db.read(lambda tx: workers.read(tx, worker_id))

    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: dict[str, Any] | Unset = UNSET,
        attempt_ids: Sequence[str] | None = None,
    ) -> Worker:
        return await self._db.write(workers.Heartbeat(worker_id, heartbeat_stats, attempt_ids), turn=JobTurn.ALIVE)

    async def release_worker(self, worker_id: str, error: str, *, quiet_seconds: float = 0.0) -> int:
        return await self._db.write(lambda tx: release(tx, worker_id, error, quiet_seconds))

    # ---- runs ------------------------------------------------------------------------------------------------------

    async def begin_run(self, run: Run, *, first_step: int = 0) -> Run:
        new = runs.prepare(run)
        return await self._db.write(lambda tx: runs.begin(tx, new, first_step))

    async def update_run(
        self,
        run_id: str,
        status: RunStatus | Unset = UNSET,
        state: Mapping[str, Any] | Unset = UNSET,
        error: str | Unset | None = UNSET,
    ) -> Run:
        new = status if isinstance(status, Unset) else RunStatus(status)
        return await self._db.write(lambda tx: runs.change(tx, run_id, new, state, error))

    async def get_run_by_id(self, run_id: str) -> Run | None:
        return await self._db.read(lambda tx: runs.read(tx, run_id))

    async def query_runs(self, **query: Unpack[RunKeywords]) -> PaginatedResult[Run]:
        wanted = queries.make(queries.RunQuery, query)
        return await self._db.read(lambda tx: searches.query_runs(tx, wanted))

    async def add_run_events(self, events: Sequence[RunEvent]) -> None:
        values = [runs.prepare_event(event) for event in events]
        if values:
            await self._db.write(lambda tx: runs.add_events(tx, values))

    async def query_run_events(self, run_id: str, **query: Unpack[RunEventKeywords]) -> PaginatedResult[RunEvent]:
        wanted = queries.make(queries.RunEventQuery, query)
        return await self._db.read(lambda tx: searches.query_run_events(tx, run_id, wanted))

    # ---- housekeeping (not part of the protocol) -------------------------------------------------------------------

    async def prune(self, *, finished_before: float | None = None, keep: int | None = None) -> int:
        """Delete rollouts that finished before a time (seconds since the epoch), or all but the `keep` last ones."""
        total = 0
        while deleted := await self._db.write(lambda tx: retention.prune(tx, finished_before, keep)):
            total += deleted
        return total

    async def export_records(self) -> AsyncIterator[transfer.Record]:
        """The finished rollouts with all that belongs to them, in the order they were enqueued; see `transfer`."""
        position = -1
        while True:
            records, position = await self._db.read(_call(transfer.export_page, after=position))
            if not records:
                return
            for record in records:
                yield record

    async def import_records(self, records: Iterable[transfer.Record]) -> int:
        """Store exported rollouts; returns how many were new. What was imported before an error stays."""
        total = 0
        batches = iter(records)
        while batch := list(itertools.islice(batches, transfer.BATCH)):
            total += await self._db.write(_call(transfer.import_records, records=batch))
        return total

    async def export_lines(self) -> AsyncIterator[bytes]:
        """The finished rollouts as JSON lines."""
        async for record in self.export_records():
            yield transfer.to_line(record)

    async def import_lines(self, lines: Iterable[bytes]) -> int:
        """Store exported JSON lines; as `import_records`."""
        return await self.import_records(transfer.from_line(line) for line in lines)
