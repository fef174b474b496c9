"""The store as other processes see it: the same protocol over HTTP.

Ids are made here, so every request may be repeated; `http` retries what a retry can heal. Long waits are repeated long
polls. Spans and changes of attempts that are reported at the same time travel together.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar
from urllib.parse import quote

import msgspec

from agentlightning.arguments import explained
from agentlightning.errors import ConflictError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.store import queries
from agentlightning.store.base import Capabilities, LightningStore
from agentlightning.store.given import Given, takes
from agentlightning.store.http import wire
from agentlightning.store.http.table import BY_NAME, HttpOperation
from agentlightning.store.http.transport import Batcher, Http, error_of, long_poll
from agentlightning.store.operations import query
from agentlightning.store.operations.calls import assemble
from agentlightning.store.operations.codec import checked_id, encode, encode_seen, encode_task, new_id
from agentlightning.store.operations.resources import decode_resources, encode_resources
from agentlightning.store.queries import PageQuery
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    Call,
    CallRecord,
    EnqueueRolloutRequest,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutRecord,
    RunEvent,
    Span,
)

P = ParamSpec("P")
R = TypeVar("R")

RETRY_SECONDS = 30.0
REQUEST_SECONDS = 60.0

ITEMS_PER_REQUEST = 1000
"""Of a query without a limit."""


def _requested(method: Callable[P, R]) -> Callable[P, R]:
    """The method of an operation that is nothing but its request."""
    operation = BY_NAME[method.__name__]

    async def ask(self: LightningStoreClient, given: Given) -> Any:
        return await self._do(operation, given)  # pyright: ignore[reportPrivateUsage]

    return takes(method)(ask)


class LightningStoreClient(LightningStore):
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

    def otlp_traces_endpoint(self) -> str:
        return self._http.url + wire.OTLP_PATH

    async def close(self) -> None:
        await self._http.close()

    # ---- what is nothing but its request -----------------------------------------------------------------------------

    enqueue_many_rollouts = _requested(LightningStore.enqueue_many_rollouts)
    start_rollout = _requested(LightningStore.start_rollout)
    query_rollouts = _requested(LightningStore.query_rollouts)
    get_rollout_by_id = _requested(LightningStore.get_rollout_by_id)
    update_rollout = _requested(LightningStore.update_rollout)
    start_attempt = _requested(LightningStore.start_attempt)
    query_attempts = _requested(LightningStore.query_attempts)
    query_spans = _requested(LightningStore.query_spans)
    get_next_span_sequence_id = _requested(LightningStore.get_next_span_sequence_id)
    add_resources = _requested(LightningStore.add_resources)
    query_resources = _requested(LightningStore.query_resources)
    get_latest_resources = _requested(LightningStore.get_latest_resources)
    get_resources_by_id = _requested(LightningStore.get_resources_by_id)
    update_resources = _requested(LightningStore.update_resources)
    query_workers = _requested(LightningStore.query_workers)
    get_worker_by_id = _requested(LightningStore.get_worker_by_id)
    update_worker = _requested(LightningStore.update_worker)
    release_worker = _requested(LightningStore.release_worker)
    begin_run = _requested(LightningStore.begin_run)
    query_runs = _requested(LightningStore.query_runs)
    get_run_by_id = _requested(LightningStore.get_run_by_id)
    update_run = _requested(LightningStore.update_run)
    query_run_events = _requested(LightningStore.query_run_events)
    statistics = _requested(LightningStore.statistics)

    # ---- rollouts and attempts -------------------------------------------------------------------------------------

    @takes(LightningStore.enqueue_rollout)
    async def enqueue_rollout(self, given: Given) -> Rollout:
        return (await self.enqueue_many_rollouts([EnqueueRolloutRequest.model_construct(**given)]))[0]

    @takes(LightningStore.dequeue_many_rollouts)
    async def dequeue_many_rollouts(self, given: Given) -> Sequence[AttemptedRollout]:
        limit, timeout, named = given.get("limit", 1), given.pop("timeout", 0.0), "attempt_ids" in given

        async def poll(wait: float) -> list[AttemptedRollout]:
            if "attempt_ids" not in given:
                given["attempt_ids"] = [new_id("at") for _ in range(limit)]
            try:
                return await self._do(BY_NAME["dequeue_many_rollouts"], {**given, "timeout": wait}, wait=wait)
            except ConflictError:
                if named:
                    raise
                # A claim whose answer was lost has been given up in the meantime; these ids are used up.
                del given["attempt_ids"]
                return []

        return await long_poll(poll, timeout, bool)

    @takes(LightningStore.update_attempt)
    async def update_attempt(self, given: Given) -> Attempt:
        ids = {name: given.pop(name) for name in ("rollout_id", "attempt_id")}
        return await self._batchers_here().changes.add({**ids, "change": given})

    async def _send_changes(self, changes: Sequence[dict[str, Any]]) -> Sequence[Attempt | Exception]:
        results = await self._do(BY_NAME["update_attempts"], changes)
        return [result if isinstance(result, Attempt) else error_of(result.status, result.detail) for result in results]

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
            body = {"rollout_ids": rollout_ids, "timeout": wait, "any": any_of}
            return await self._do(BY_NAME["wait_for_rollouts"], body, wait=wait)

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
        stored = await self._do(BY_NAME["add_many_spans"], spans)
        numbers = {(item["attempt_id"], item["span_id"]): item["sequence_id"] for item in stored}
        return [
            span.model_copy(update={"sequence_id": numbers.pop((span.attempt_id, span.span_id))})
            for span in spans
            if (span.attempt_id, span.span_id) in numbers
        ]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        body = [{"rollout_id": rollout, "attempt_id": attempt} for rollout, attempt in rollout_attempt_ids]
        return await self._do(BY_NAME["get_many_span_sequence_ids"], body)

    async def add_calls(self, records: Sequence[CallRecord]) -> None:
        if records:
            await self._do(BY_NAME["add_calls"], wire.encode_records(records))

    async def query_calls(
        self, rollout_ids: Sequence[str], *, latest_attempt_only: bool = True
    ) -> dict[str, Sequence[Call]]:
        given = {"rollout_ids": rollout_ids, "latest_attempt_only": latest_attempt_only}
        return assemble(wire.decode_table(await self._do(BY_NAME["query_calls"], given)), rollout_ids)

    async def query_records(self, rollout_ids: Sequence[str]) -> Sequence[RolloutRecord]:
        answer = await self._do(BY_NAME["query_records"], {"rollout_ids": rollout_ids})
        return query.assemble(wire.decode_record_table(answer))

    async def add_run_events(self, events: Sequence[RunEvent]) -> None:
        if events:
            await self._do(BY_NAME["add_run_events"], events)

    async def stay(self, worker_id: str, seconds: float) -> None:
        """Keep a connection open for so long: when it ends before, the server gives back what the worker holds."""
        await self._do(BY_NAME["stay"], {"worker_id": worker_id, "timeout": seconds}, wait=seconds)

    # ---- requests --------------------------------------------------------------------------------------------------

    async def _do(self, operation: HttpOperation, given: Any, *, wait: float = 0.0) -> Any:
        """Ask the server for an operation, by its arguments or by a ready body."""
        path, body = operation.path, given
        if isinstance(given, dict):
            body = dict(given)
            for name, prefix in operation.makes.items():
                body[name] = body.get(name) or new_id(prefix)
            path = path.format(**{name: _in_path(operation, name, body.pop(name)) for name in operation.ids})
        if isinstance(operation.body, type) and issubclass(operation.body, PageQuery):
            return await self._pages(operation, path, queries.make(operation.body, body))
        try:
            answer = await self._send(operation, path, body, wait)
        except NotFoundError:
            if operation.otherwise is None:
                raise
            return None
        return _read(operation, answer)

    async def _send(self, operation: HttpOperation, path: str, body: Any, wait: float = 0.0) -> bytes:
        pool = "beats" if operation.name == "update_worker" else "work"
        content = None if operation.body is None else body if operation.body is bytes else _written(operation, body)
        return await self._http.request(operation.verb, path, content, operation.takes, wait=wait, pool=pool)

    async def _pages(self, operation: HttpOperation, path: str, query: PageQuery) -> PaginatedResult[Any]:
        """One page as it is asked for; without a limit all of them, a page at a time."""
        if query.limit >= 0:
            return _read(operation, await self._send(operation, path, query.given()))
        items: list[Any] = []
        page = query.model_copy(update={"limit": ITEMS_PER_REQUEST})
        while True:
            part = _read(operation, await self._send(operation, path, {**page.given(), "limit": ITEMS_PER_REQUEST}))
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


# ---- between arguments and the wire ----------------------------------------------------------------------------------


def _in_path(operation: HttpOperation, name: str, value: str) -> str:
    return quote(checked_id(value, f"A {name}") if operation.checks else value, safe="")


def _written(operation: HttpOperation, body: Any) -> bytes:
    if isinstance(body, dict):
        body = {operation.names.get(name, name): _WRITERS.get(name, _plain)(value) for name, value in body.items()}
    return (encode_seen if operation.seen else encode)(body).encode()


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, Collection) and not isinstance(value, str | Mapping) else value


def _new_rollouts(requests: Sequence[EnqueueRolloutRequest]) -> list[Given]:
    return [
        {**one.__dict__, "input": _task(one.input), "rollout_id": one.rollout_id or new_id("ro")} for one in requests
    ]


def _task(input: Any) -> msgspec.Raw:
    return msgspec.Raw(encode_task(input, "A task").encode())


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "input": _task,
    "resources": lambda resources: msgspec.Raw(encode_resources(resources).encode()),
    "requests": _new_rollouts,
}
"""Of arguments that are not written as they are."""


def _read(operation: HttpOperation, answer: bytes) -> Any:
    if operation.answer is bytes or operation.answer is None:
        return answer if operation.answer else None
    if operation.answer is ResourcesUpdate:
        return _to_update(msgspec.json.decode(answer))
    if operation.answer is PaginatedResult[ResourcesUpdate]:
        page = msgspec.json.decode(answer)
        page["items"] = [_to_update(item) for item in page["items"]]
        return PaginatedResult[ResourcesUpdate].model_construct(**page)
    return operation.answers.validate_json(answer)


def _to_update(values: dict[str, Any]) -> ResourcesUpdate:
    return ResourcesUpdate.model_construct(**{**values, "resources": decode_resources(values["resources"])})


class _Batchers(NamedTuple):
    """What travels together, on one event loop."""

    spans: Batcher[Span, Span | None]
    changes: Batcher[dict[str, Any], Attempt]
