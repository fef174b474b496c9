"""The store as other processes see it: the same protocol over HTTP.

Ids are made here, so every request may be repeated; `http` retries what a retry can heal. Long waits are repeated long
polls. Spans and changes of attempts that are reported at the same time travel together.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, Unpack

import msgspec
from pydantic import TypeAdapter

from agentlightning.arguments import explained
from agentlightning.errors import ConflictError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.store import queries
from agentlightning.store.base import UNSET, Capabilities, Statistics, Unset
from agentlightning.store.http import bodies, wire
from agentlightning.store.http.batching import Batcher
from agentlightning.store.http.transport import Http, error_of, long_poll
from agentlightning.store.operations import records
from agentlightning.store.operations.calls import assemble
from agentlightning.store.operations.codec import checked_id, encode, encode_seen, new_id
from agentlightning.store.queries import (
    PageKeywords,
    PageQuery,
    ResourcesKeywords,
    RolloutKeywords,
    RunEventKeywords,
    RunKeywords,
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

T = TypeVar("T")

RETRY_SECONDS = 30.0
REQUEST_SECONDS = 60.0

ITEMS_PER_REQUEST = 1000
"""Of a query without a limit."""

_statistics = TypeAdapter(Statistics)
_rollouts = TypeAdapter(list[Rollout])
_claims = TypeAdapter(list[AttemptedRollout])
_either = TypeAdapter[AttemptedRollout | Rollout](AttemptedRollout | Rollout)
_changed = TypeAdapter(list[Attempt | wire.Problem])
_read_rollouts = TypeAdapter[PaginatedResult[Rollout]](PaginatedResult[AttemptedRollout | Rollout]).validate_json
_read_attempts = TypeAdapter(PaginatedResult[Attempt]).validate_json
_read_spans = TypeAdapter(PaginatedResult[Span]).validate_json
_read_workers = TypeAdapter(PaginatedResult[Worker]).validate_json
_read_runs = TypeAdapter(PaginatedResult[Run]).validate_json
_read_events = TypeAdapter(PaginatedResult[RunEvent]).validate_json


class LightningStoreClient:
    """A `LightningStore` served at `url`. `key` is the server's admin key; one that a server of yours on this machine
    made for itself is found without being given.

    `retry_seconds` is how long an operation is tried while the server cannot be reached, before it fails.
    """

    @explained
    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        retry_seconds: float = RETRY_SECONDS,
        request_seconds: float = REQUEST_SECONDS,
    ):
        self._given = (url, key, retry_seconds, request_seconds)
        self._begin()

    def _begin(self) -> None:
        self._http = Http(*self._given)
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Batchers] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Pickled by its address and key, for other processes; connections are made anew."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_http", "_batchers")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(thread_safe=True, async_safe=True, multi_process=True, durable=True, otlp_traces=True)

    async def statistics(self) -> Statistics:
        return _statistics.validate_json(await self._get("/statistics"))

    def otlp_traces_endpoint(self) -> str:
        return self._http.url + wire.OTLP_PATH

    async def close(self) -> None:
        await self._http.close()

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
        body = {
            **bodies.new_rollout(input, mode, resources_id, config, metadata, rollout_id, run_id),
            "worker_id": worker_id,
            "attempt_id": attempt_id or new_id("at"),
        }
        return AttemptedRollout.model_validate_json(await self._post("/rollouts", body))

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
        new = bodies.new_rollout(input, mode, resources_id, config, metadata, rollout_id, run_id)
        return (await self._enqueue([new]))[0]

    async def enqueue_many_rollouts(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[Rollout]:
        return await self._enqueue([bodies.new_rollout(**request.__dict__) for request in requests])

    async def _enqueue(self, new: Sequence[dict[str, Any]]) -> list[Rollout]:
        return _rollouts.validate_json(await self._post("/queues/rollouts/enqueue", {"rollouts": new}))

    async def dequeue_rollout(
        self,
        worker_id: str | None = None,
        *,
        timeout: float = 0.0,
        attempt_id: str | None = None,
        run_id: str | None = None,
    ) -> AttemptedRollout | None:
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
        given = attempt_ids is not None
        body: dict[str, Any] = {"limit": limit, "worker_id": worker_id, "run_id": run_id}
        body["attempt_ids"] = list(attempt_ids) if attempt_ids is not None else [new_id("at") for _ in range(limit)]

        async def poll(wait: float) -> list[AttemptedRollout]:
            try:
                answer = await self._post("/queues/rollouts/dequeue", {**body, "timeout": wait}, wait=wait)
            except ConflictError:
                if given:
                    raise
                # A claim whose answer was lost has been given up in the meantime; these ids are used up.
                body["attempt_ids"] = [new_id("at") for _ in range(limit)]
                return []
            return _claims.validate_json(answer)

        return await long_poll(poll, timeout, bool)

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None, attempt_id: str | None = None
    ) -> AttemptedRollout:
        body = {"worker_id": worker_id, "attempt_id": attempt_id or new_id("at")}
        answer = await self._post(f"/rollouts/{bodies.path(rollout_id)}/attempts", body)
        return AttemptedRollout.model_validate_json(answer)

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
        body = bodies.given(mode=mode, resources_id=resources_id, status=status, config=config, metadata=metadata)
        if not isinstance(input, Unset):
            body["input"] = bodies.task(input)
        return Rollout.model_validate_json(await self._post(f"/rollouts/{bodies.path(rollout_id)}", body))

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
        body = bodies.given(
            status=status,
            worker_id=worker_id,
            last_heartbeat_time=last_heartbeat_time,
            metadata=metadata,
            outcome=outcome,
            error=error,
        )
        change = {"rollout_id": rollout_id, "attempt_id": attempt_id, "change": body}
        return await self._batchers_here().changes.add(change)

    async def _send_changes(self, changes: Sequence[dict[str, Any]]) -> Sequence[Attempt | Exception]:
        results = _changed.validate_json(await self._post("/attempts/update", changes))
        return [result if isinstance(result, Attempt) else error_of(result.status, result.detail) for result in results]

    async def query_rollouts(self, **query: Unpack[RolloutKeywords]) -> PaginatedResult[Rollout]:
        return await self._search("/rollouts/search", queries.make(queries.RolloutQuery, query), _read_rollouts)

    async def query_attempts(self, rollout_id: str, **query: Unpack[PageKeywords]) -> PaginatedResult[Attempt]:
        wanted = queries.make(queries.AttemptQuery, query)
        return await self._search(f"/rollouts/{bodies.path(rollout_id)}/attempts/search", wanted, _read_attempts)

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        return await self._find(f"/rollouts/{bodies.path(rollout_id)}", _either.validate_json)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        found = await self.get_rollout_by_id(rollout_id)
        return found.attempt if isinstance(found, AttemptedRollout) else None

    async def wait_for_rollouts(self, *, rollout_ids: Sequence[str], timeout: float | None = None) -> Sequence[Rollout]:
        wanted = len(set(rollout_ids))
        return await self._wait(rollout_ids, timeout, any_of=False, enough=lambda found: len(found) == wanted)

    async def wait_for_any_rollout(
        self, *, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> Sequence[Rollout]:
        return await self._wait(rollout_ids, timeout, any_of=True, enough=bool)

    async def _wait(
        self,
        rollout_ids: Sequence[str],
        timeout: float | None,
        *,
        any_of: bool,
        enough: Callable[[list[Rollout]], bool],
    ) -> list[Rollout]:
        if not rollout_ids:
            return []

        async def poll(wait: float) -> list[Rollout]:
            body = {"rollout_ids": list(rollout_ids), "timeout": wait, "any": any_of}
            answer = await self._post("/waits/rollouts", body, wait=wait)
            return list[Rollout](wire.rollout_list.validate_json(answer))

        return await long_poll(poll, timeout, enough)

    # ---- spans and calls -------------------------------------------------------------------------------------------

    async def add_span(self, span: Span) -> Span | None:
        return await self._batchers_here().spans.add(span)

    async def _send_spans(self, spans: Sequence[Span]) -> Sequence[Span | Exception | None]:
        try:
            stored = {(span.attempt_id, span.span_id): span for span in await self.add_many_spans(spans)}
        except StoreUnavailableError:
            raise
        except StoreError as error:
            if len(spans) == 1:
                return [error]
            # One bad span must not fail the others: send them one by one.
            return [(await self._send_spans([span]))[0] for span in spans]
        return [stored.pop((span.attempt_id, span.span_id), None) for span in spans]

    def _batchers_here(self) -> _Batchers:
        loop = asyncio.get_running_loop()
        found = self._batchers.get(loop)
        if found is None:
            found = self._batchers[loop] = _Batchers(Batcher(self._send_spans), Batcher(self._send_changes))
        return found

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        stored = msgspec.json.decode(await self._http.json("POST", "/spans", encode_seen(spans).encode()))
        numbers = {(item["attempt_id"], item["span_id"]): item["sequence_id"] for item in stored}
        return [
            span.model_copy(update={"sequence_id": numbers.pop((span.attempt_id, span.span_id))})
            for span in spans
            if (span.attempt_id, span.span_id) in numbers
        ]

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: Any, sequence_id: int | None = None
    ) -> Span | None:
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id or 0))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return int(await self._post("/spans/next", {"rollout_id": rollout_id, "attempt_id": attempt_id}))

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        body = [{"rollout_id": rollout, "attempt_id": attempt} for rollout, attempt in rollout_attempt_ids]
        return msgspec.json.decode(await self._post("/spans/next/many", body), type=list[int])

    async def query_spans(
        self, rollout_id: str, attempt_id: str | Literal["latest"] | None = None, **query: Unpack[SpanKeywords]
    ) -> PaginatedResult[Span]:
        wanted = queries.make(queries.SpanQuery, {"rollout_id": rollout_id, "attempt_id": attempt_id, **query})
        return await self._search("/spans/search", wanted, _read_spans)

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        if records:
            await self._http.msgpack("/calls", wire.encode_records(records))

    async def query_calls(
        self, rollout_ids: Sequence[str], *, latest_attempt_only: bool = True
    ) -> dict[str, Sequence[Call]]:
        body = {"rollout_ids": list(rollout_ids), "latest_attempt_only": latest_attempt_only}
        return assemble(wire.decode_table(await self._post("/calls/search", body)), rollout_ids)

    async def query_records(self, rollout_ids: Sequence[str]) -> Sequence[RolloutRecord]:
        answer = await self._post("/records/search", {"rollout_ids": list(rollout_ids)})
        return records.assemble(wire.decode_record_table(answer))

    # ---- resources and workers -------------------------------------------------------------------------------------

    async def add_resources(self, resources: NamedResources, resources_id: str | None = None) -> ResourcesUpdate:
        body = {"resources": bodies.named(resources), "resources_id": resources_id or new_id("rs")}
        return bodies.to_update(await self._post("/resources", body))

    async def update_resources(self, resources_id: str, resources: NamedResources) -> ResourcesUpdate:
        body = encode({"resources": bodies.named(resources)}).encode()
        path = bodies.path(checked_id(resources_id, "A resources_id"))
        return bodies.to_update(await self._http.json("PUT", f"/resources/{path}", body))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        return await self._find(f"/resources/{bodies.path(resources_id)}", bodies.to_update)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self._find("/resources/latest", bodies.to_update)

    async def query_resources(self, **query: Unpack[ResourcesKeywords]) -> PaginatedResult[ResourcesUpdate]:
        return await self._search(
            "/resources/search", queries.make(queries.ResourcesQuery, query), bodies.read_resources
        )

    async def query_workers(self, **query: Unpack[WorkerKeywords]) -> PaginatedResult[Worker]:
        return await self._search("/workers/search", queries.make(queries.WorkerQuery, query), _read_workers)

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        return await self._find(f"/workers/{bodies.path(worker_id)}", Worker.model_validate_json)

    async def update_worker(
        self,
        worker_id: str,
        heartbeat_stats: dict[str, Any] | Unset = UNSET,
        attempt_ids: Sequence[str] | None = None,
    ) -> Worker:
        body = bodies.given(
            heartbeat_stats=heartbeat_stats, attempt_ids=UNSET if attempt_ids is None else list(attempt_ids)
        )
        path = bodies.path(checked_id(worker_id, "A worker_id"))
        return Worker.model_validate_json(await self._post(f"/workers/{path}", body, pool="beats"))

    async def release_worker(self, worker_id: str, error: str, *, quiet_seconds: float = 0.0) -> int:
        path = bodies.path(checked_id(worker_id, "A worker_id"))
        return int(await self._post(f"/workers/{path}/release", {"error": error, "quiet_seconds": quiet_seconds}))

    async def stay(self, worker_id: str, seconds: float) -> None:
        """Keep a connection open for so long: when it ends before, the server gives back what the worker holds."""
        await self._post(f"/workers/{bodies.path(worker_id)}/presence", {"timeout": seconds}, wait=seconds)

    # ---- runs ------------------------------------------------------------------------------------------------------

    async def begin_run(self, run: Run, *, first_step: int = 0) -> Run:
        body = {"run": run, "first_step": first_step}
        return Run.model_validate_json(await self._http.json("POST", "/runs", encode_seen(body).encode()))

    async def update_run(
        self,
        run_id: str,
        status: RunStatus | Unset = UNSET,
        state: Mapping[str, Any] | Unset = UNSET,
        error: str | Unset | None = UNSET,
    ) -> Run:
        body = encode_seen(bodies.given(status=status, state=state, error=error)).encode()
        return Run.model_validate_json(await self._http.json("POST", f"/runs/{bodies.path(run_id)}", body))

    async def get_run_by_id(self, run_id: str) -> Run | None:
        return await self._find(f"/runs/{bodies.path(run_id)}", Run.model_validate_json)

    async def query_runs(self, **query: Unpack[RunKeywords]) -> PaginatedResult[Run]:
        return await self._search("/runs/search", queries.make(queries.RunQuery, query), _read_runs)

    async def add_run_events(self, events: Sequence[RunEvent]) -> None:
        if events:
            await self._http.json("POST", "/runs/events", encode_seen(list(events)).encode())

    async def query_run_events(self, run_id: str, **query: Unpack[RunEventKeywords]) -> PaginatedResult[RunEvent]:
        wanted = queries.make(queries.RunEventQuery, query)
        return await self._search(f"/runs/{bodies.path(run_id)}/events/search", wanted, _read_events)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> bytes:
        return await self._http.json("GET", path)

    async def _post(self, path: str, body: Any, *, wait: float = 0.0, pool: str = "work") -> bytes:
        return await self._http.json("POST", path, encode(body).encode(), wait=wait, pool=pool)

    async def _search(
        self, path: str, query: PageQuery, read: Callable[[bytes], PaginatedResult[T]]
    ) -> PaginatedResult[T]:
        """One page as it is asked for; without a limit all of them, a page at a time."""
        if query.limit >= 0:
            return read(await self._post(path, query.given()))
        items: list[T] = []
        page = query.model_copy(update={"limit": ITEMS_PER_REQUEST})
        while True:
            given = {**page.given(), "limit": ITEMS_PER_REQUEST}
            part = read(await self._post(path, given))
            items += part.items
            if len(part.items) < ITEMS_PER_REQUEST:
                total = query.offset + len(items) if query.cursor is None and items else part.total
                return part.model_copy(
                    update={"items": items, "limit": -1, "offset": query.offset, "total": total, "next_cursor": None}
                )
            if part.next_cursor is not None:
                page = page.model_copy(update={"cursor": part.next_cursor, "offset": 0})
            else:  # sorted by a column that may be empty
                page = page.model_copy(update={"offset": page.offset + len(part.items)})

    async def _find(self, path: str, make: Callable[[bytes], T]) -> T | None:
        try:
            return make(await self._get(path))
        except NotFoundError:
            return None


class _Batchers(NamedTuple):
    """What travels together, on one event loop."""

    spans: Batcher[Span, Span | None]
    changes: Batcher[dict[str, Any], Attempt]
