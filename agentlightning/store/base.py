"""The store's protocol: the only truth about rollouts, attempts, spans, calls, resources and workers.

Every write is idempotent where the caller gives the id, every change of status is one compare-and-set against the
tables in `types.status`, and every method may be called from any event loop. Returning from a write means it is
committed. Lookups of unknown ids return None or an empty page; updates of unknown ids raise `NotFoundError`. A query
without a limit returns all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, Protocol, Unpack, runtime_checkable

from typing_extensions import TypedDict  # pydantic, which the server uses, wants this one before Python 3.12

from agentlightning.store.queries import (
    DEFAULT_LIMIT,
    FilterLogic,
    PageKeywords,
    ResourcesKeywords,
    RolloutKeywords,
    RunEventKeywords,
    RunKeywords,
    SortOrder,
    SpanKeywords,
    WorkerKeywords,
)
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
    RolloutConfig,
    RolloutMode,
    RolloutRecord,
    RolloutStatus,
    Run,
    RunEvent,
    RunStatus,
    Span,
    Worker,
)

__all__ = [
    "DEFAULT_LIMIT",
    "UNSET",
    "Capabilities",
    "FilterLogic",
    "LightningStore",
    "SortOrder",
    "Statistics",
    "Unset",
]


class Unset:
    """The type of `UNSET`: the argument was not given, as opposed to given as None."""

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        """Copied and pickled by its name, because it is compared by identity."""
        return "UNSET"


UNSET = Unset()


class Statistics(TypedDict):
    """Counts per status and in total; all are kept as counters, so reading them does not scan."""

    name: str
    rollouts: dict[str, int]
    attempts: dict[str, int]
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_calls: int
    total_resources: int
    total_workers: int
    uptime_seconds: float
    uptime: NotRequired[float]
    """The same, by its older name."""


class Capabilities(TypedDict):
    """What a store can do: used from several threads, by several processes, with an OTLP endpoint."""

    thread_safe: bool
    async_safe: bool
    multi_process: bool
    durable: bool
    otlp_traces: bool


@runtime_checkable
class LightningStore(Protocol):
    """Where everything about rollouts is recorded. What can be done by other methods is done so here.

    Every write is idempotent where the caller gives the id, every change of status is one compare-and-set, and every
    method may be called from any event loop. Returning from a write means it is committed. Lookups of unknown ids
    return None or an empty page; updates of unknown ids raise `NotFoundError`.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        ...

    async def statistics(self) -> Statistics:
        """How many records of each kind and status there are."""
        ...

    def otlp_traces_endpoint(self) -> str:
        """URL of the OTLP/HTTP intake; raises `StoreError` for a store without a server."""
        ...

    async def close(self) -> None:
        """Commit what was accepted, stop the watchdog and the writer. Idempotent."""
        ...

    # ---- rollouts and attempts -------------------------------------------------------------------------------------

    async def start_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        run_id: str | None = None,
    ) -> AttemptedRollout:
        """Create a rollout that is claimed at once by the caller. `resources_id=None`: the latest resources."""
        ...

    async def enqueue_rollout(
        self,
        input: Any,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        rollout_id: str | None = None,
        run_id: str | None = None,
    ) -> Rollout:
        """Queue one rollout; harmless to repeat with a `rollout_id`. `resources_id=None`: the resources that are the
        latest now."""
        ...

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        """Enqueue all or none."""
        ...

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        attempt_id: str | None = None,
        run_id: str | None = None,
    ) -> AttemptedRollout | None:
        """Claim the oldest queued rollout, waiting up to `timeout` seconds for one (a long poll, not a loop).

        A caller that gives `attempt_id` and repeats the request gets the same claim again. With a `run_id` it gets
        rollouts of this run and of none, never of another run.
        """
        ids = None if attempt_id is None else [attempt_id]
        claims = await self.dequeue_many_rollouts(1, worker_id, timeout=timeout, attempt_ids=ids, run_id=run_id)
        return claims[0] if claims else None

    async def dequeue_many_rollouts(
        self,
        limit: int = 1,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        attempt_ids: Sequence[str] | None = None,
        run_id: str | None = None,
    ) -> Sequence[AttemptedRollout]:
        """Claim up to `limit` rollouts; returns as soon as there is at least one."""
        ...

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, attempt_id: str | None = None
    ) -> AttemptedRollout:
        """Begin a further attempt at a rollout by hand, without the queue."""
        ...

    async def update_rollout(
        self,
        rollout_id: str,
        input: Any | Unset = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Change a rollout. `status=CANCELLED` also cancels its open attempt."""
        ...

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
        outcome: Outcome | Unset = UNSET,
        error: str | Unset | None = UNSET,
    ) -> Attempt:
        """Change an attempt; its rollout's status follows (see RolloutConfig for retries).

        Repeating a finish with the same status changes nothing; finishing with another one raises `ConflictError`.
        """
        ...

    async def query_rollouts(self, **query: Unpack[RolloutKeywords]) -> PaginatedResult[Rollout]:
        """Rollouts, each with its latest attempt if it has one. The keywords of this and of all queries: `queries`."""
        ...

    async def query_attempts(self, rollout_id: str, **query: Unpack[PageKeywords]) -> PaginatedResult[Attempt]:
        """The attempts at a rollout, the first one first."""
        ...

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """The rollout, with its latest attempt if it has one."""
        ...

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The last attempt at a rollout; None if there is none."""
        found = await self.get_rollout_by_id(rollout_id)
        return found.attempt if isinstance(found, AttemptedRollout) else None

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        """The finished ones of `rollout_ids`: when all are finished, or after `timeout` seconds (None: no limit).

        Raises NotFoundError for one that there is not: nothing would tell it from one that is not finished yet.
        """
        ...

    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        """The finished ones of `rollout_ids`, as soon as there is at least one, or after `timeout` seconds."""
        ...

    # ---- spans and calls -------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        """Store a span, which moves preparing → running. Harmless to repeat, by (attempt_id, span_id): then None."""
        ...

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Store spans of any attempts, all or none; returns those that were new."""
        ...

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span | None:
        """Store a span of the OpenTelemetry SDK. None if it was there already."""
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Take the next sequence number of an attempt's spans."""
        ...

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """The next sequence number of each (rollout_id, attempt_id), in their order."""
        ...

    async def query_spans(
        self, rollout_id: str, attempt_id: str | Literal["latest"] | None = None, **query: Unpack[SpanKeywords]
    ) -> PaginatedResult[Span]:
        """Spans of a rollout; `attempt_id=None` all attempts, "latest" the last one. Spans of calls are among them."""
        ...

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        """Store calls with their segments and spans, all or none; a call_id that is there already is skipped."""
        ...

    async def query_calls(
        self, rollout_ids: Sequence[str], *, latest_attempt_only: bool = True
    ) -> dict[str, Sequence[Call]]:
        """Calls of each rollout in the order they were stored, with whole arrays. One query however many rollouts."""
        ...

    async def query_records(self, rollout_ids: Sequence[str]) -> Sequence[RolloutRecord]:
        """All that an algorithm reads of rollouts, at once: those that exist, in the order asked for."""
        ...

    # ---- resources and workers -------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        """Store resources as a new entry, which becomes the latest one."""
        ...

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        """Insert or replace; the version grows by one and these become the latest resources."""
        ...

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The resources with this id."""
        ...

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The resources that were added or updated last."""
        ...

    async def query_resources(self, **query: Unpack[ResourcesKeywords]) -> PaginatedResult[ResourcesUpdate]:
        """All resources that there have been."""
        ...

    async def query_workers(self, **query: Unpack[WorkerKeywords]) -> PaginatedResult[Worker]:
        """The runners that have been heard of."""
        ...

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """One runner."""
        ...

    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: dict[str, Any] | Unset = UNSET,
        attempt_ids: Sequence[str] | None = None,
    ) -> Worker:
        """A worker's heartbeat. It keeps `attempt_ids` alive, or if it names none all attempts of the worker.

        A worker that names what it really holds lets go of claims whose answers it never got.
        """
        ...

    async def release_worker(self, worker_id: str, error: str, *, quiet_seconds: float = 0.0) -> int:
        """Give back what a worker holds that is known to be gone: its open attempts end as unresponsive, with this
        error, and their rollouts are handed out again. How many there were; none where it was heard of within
        `quiet_seconds`."""
        ...

    # ---- runs ------------------------------------------------------------------------------------------------------

    async def begin_run(self, run: Run, *, first_step: int = 0) -> Run:
        """Store a run that begins, or goes on before step `first_step`: what it said of later steps is dropped."""
        ...

    async def update_run(
        self,
        run_id: str,
        status: RunStatus | Unset = UNSET,
        state: Mapping[str, Any] | Unset = UNSET,
        error: str | Unset | None = UNSET,
    ) -> Run:
        """Say where a run stands; entries of `state` replace those of the same name."""
        ...

    async def get_run_by_id(self, run_id: str) -> Run | None:
        """One run."""
        ...

    async def query_runs(self, **query: Unpack[RunKeywords]) -> PaginatedResult[Run]:
        """The runs that this store holds."""
        ...

    async def add_run_events(self, events: Sequence[RunEvent]) -> None:
        """Append what a run measured or said; harmless to repeat, by (run_id, event_id)."""
        ...

    async def query_run_events(self, run_id: str, **query: Unpack[RunEventKeywords]) -> PaginatedResult[RunEvent]:
        """What a run measured and said, in order."""
        ...
