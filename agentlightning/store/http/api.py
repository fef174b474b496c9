"""The store over HTTP: one endpoint per operation of the protocol, under /v1/agl.

Bodies are in `wire`; who may call what is in `access`; errors are problem details that say what to do next. The
endpoints that carry the load come first, because routes are tried in their order; `hot` answers them without FastAPI.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.store import queries
from agentlightning.store.base import UNSET, Statistics
from agentlightning.store.http import otlp, prometheus, size, wire
from agentlightning.store.http.attendance import Attendance
from agentlightning.store.http.intake import Intake
from agentlightning.store.http.problems import TITLES, problem
from agentlightning.store.operations.resources import decode_resources
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    ResourcesUpdate,
    Rollout,
    Run,
    RunEvent,
    Span,
    Worker,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")

STATUS_OF: dict[type[Exception], int] = {
    NotFoundError: 404,
    ConflictError: 409,
    StoreUnavailableError: 503,
    size.TooMuch: 413,
    StoreError: 422,
    ConfigError: 422,
}
_problems: dict[int | str, dict[str, Any]] = {
    code: {"model": wire.Problem, "description": TITLES[code]} for code in (404, 409, 422, 503)
}

router = APIRouter(prefix=wire.PREFIX, responses=_problems)


async def _store(request: Request) -> SqlLightningStore:
    # Async although it waits for nothing: FastAPI sends other dependencies through a thread.
    return request.app.state.store


Store = Annotated[SqlLightningStore, Depends(_store)]


def _status_of(error: BaseException) -> int:
    return next(code for kind, code in STATUS_OF.items() if isinstance(error, kind))


def _problem_of(error: BaseException) -> wire.Problem:
    if not isinstance(error, StoreError):
        raise error
    status = _status_of(error)
    return wire.Problem(title=TITLES[status], status=status, detail=str(error))


async def while_connected(request: Request, waiting: Awaitable[T]) -> T:
    """A long poll that is cancelled when its client goes away, so that nothing is handed to nobody."""
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if task.cancelled():
            raise StoreUnavailableError("The client went away before there was an answer.")
        return await task
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---- the queue -------------------------------------------------------------------------------------------------------


@router.post("/queues/rollouts/enqueue", summary="Enqueue rollouts, all or none")
async def enqueue(store: Store, body: wire.Enqueue) -> list[Rollout]:
    return list(await store.enqueue_many_rollouts(body.rollouts))


@router.post("/queues/rollouts/dequeue", summary="Claim queued rollouts, waiting for the first one")
async def dequeue(request: Request, store: Store, body: wire.Dequeue) -> list[AttemptedRollout]:
    claims = store.dequeue_many_rollouts(
        body.limit, body.worker_id, timeout=body.timeout, attempt_ids=body.attempt_ids, run_id=body.run_id
    )
    return list(await (while_connected(request, claims) if body.timeout else claims))


@router.post("/waits/rollouts", summary="Wait until one or all of some rollouts are finished")
async def wait(request: Request, store: Store, body: wire.Wait) -> list[AttemptedRollout | Rollout]:
    wait_for = store.wait_for_any_rollout if body.any else store.wait_for_rollouts
    return list(await while_connected(request, wait_for(rollout_ids=body.rollout_ids, timeout=body.timeout)))


@router.post("/attempts/update", summary="Change many attempts; each succeeds or fails by itself")
async def update_attempts(store: Store, body: list[wire.AttemptChange]) -> list[Attempt | wire.Problem]:
    updates = [store.update_attempt(one.rollout_id, one.attempt_id, **_given(one.change)) for one in body]
    results = await asyncio.gather(*updates, return_exceptions=True)
    return [result if isinstance(result, Attempt) else _problem_of(result) for result in results]


# ---- spans and calls -------------------------------------------------------------------------------------------------


@router.post("/spans", summary="Store spans; those that were there already are left out of the answer")
async def add_spans(store: Store, body: list[Span]) -> list[dict[str, Any]]:
    stored = await store.add_many_spans(body)
    return [
        {"attempt_id": span.attempt_id, "span_id": span.span_id, "sequence_id": span.sequence_id} for span in stored
    ]


@router.get("/spans", summary="Spans of a rollout")
async def list_spans(store: Store, query: Annotated[queries.SpanQuery, Query()]) -> Response:
    return _page(await store.query_spans(**query.given()))


@router.post("/spans/search", summary="Spans of a rollout")
async def search_spans(store: Store, body: queries.SpanQuery) -> Response:
    return _page(await store.query_spans(**body.given()))


@router.post("/spans/next", summary="Reserve a sequence number")
async def next_sequence_id(store: Store, body: wire.NextSequence) -> int:
    return await store.get_next_span_sequence_id(body.rollout_id, body.attempt_id)


@router.post("/spans/next/many", summary="Reserve a sequence number for each attempt")
async def next_sequence_ids(store: Store, body: list[wire.NextSequence]) -> list[int]:
    return list(await store.get_many_span_sequence_ids([(one.rollout_id, one.attempt_id) for one in body]))


_msgpack: dict[str, Any] = {"content": {wire.MSGPACK: {"schema": {"type": "string", "format": "binary"}}}}


@router.post(
    "/calls",
    summary="Store calls with their token segments (msgpack)",
    status_code=204,
    openapi_extra={"requestBody": {**_msgpack, "required": True}},
)
async def add_calls(request: Request, store: Store) -> None:
    await store.add_calls(wire.decode_records(await request.body()))


@router.post("/calls/search", summary="Calls of rollouts as stored (msgpack)", responses={200: _msgpack})
async def search_calls(store: Store, body: wire.SearchCalls) -> Response:
    table = await store.fetch_calls(body.rollout_ids, latest_attempt_only=body.latest_attempt_only)
    return Response(wire.encode_table(table), media_type=wire.MSGPACK)


@router.post("/records/search", summary="All that an algorithm reads of rollouts (msgpack)", responses={200: _msgpack})
async def search_records(store: Store, body: wire.SearchRecords) -> Response:
    table = await store.fetch_records(body.rollout_ids)
    return Response(wire.encode_record_table(table), media_type=wire.MSGPACK)


# ---- rollouts and attempts -------------------------------------------------------------------------------------------


@router.post("/rollouts", summary="Create a rollout and claim it")
async def start_rollout(store: Store, body: wire.StartRollout) -> AttemptedRollout:
    return await store.start_rollout(**body.__dict__)


@router.get("/rollouts", summary="Rollouts by filter")
async def list_rollouts(store: Store, query: Annotated[queries.RolloutQuery, Query()]) -> Response:
    return _page(await store.query_rollouts(**query.given()))


@router.post("/rollouts/search", summary="Rollouts by filter")
async def search_rollouts(store: Store, body: queries.RolloutQuery) -> Response:
    return _page(await store.query_rollouts(**body.given()))


@router.get("/rollouts/{rollout_id}", summary="A rollout with its latest attempt", response_model=None)
async def get_rollout(store: Store, rollout_id: str) -> Response:
    return _found(await store.get_rollout_by_id(rollout_id), f"There is no rollout '{rollout_id}' in the store.")


@router.post("/rollouts/{rollout_id}", summary="Change a rollout")
async def update_rollout(store: Store, rollout_id: str, body: wire.UpdateRollout) -> Rollout:
    return await store.update_rollout(rollout_id, **_given(body))


@router.post("/rollouts/{rollout_id}/attempts", summary="Claim this rollout")
async def start_attempt(store: Store, rollout_id: str, body: wire.StartAttempt) -> AttemptedRollout:
    return await store.start_attempt(rollout_id, body.worker_id, body.attempt_id)


@router.get("/rollouts/{rollout_id}/attempts", summary="Attempts of a rollout")
async def list_attempts(store: Store, rollout_id: str, query: Annotated[queries.AttemptQuery, Query()]) -> Response:
    return _page(await store.query_attempts(rollout_id, **query.given()))


@router.post("/rollouts/{rollout_id}/attempts/search", summary="Attempts of a rollout")
async def search_attempts(store: Store, rollout_id: str, body: queries.AttemptQuery) -> Response:
    return _page(await store.query_attempts(rollout_id, **body.given()))


@router.post("/rollouts/{rollout_id}/attempts/{attempt_id}", summary="Change an attempt, or send its heartbeat")
async def update_attempt(store: Store, rollout_id: str, attempt_id: str, body: wire.UpdateAttempt) -> Attempt:
    return await store.update_attempt(rollout_id, attempt_id, **_given(body))


# ---- resources and workers -------------------------------------------------------------------------------------------


@router.post("/resources", summary="Add resources")
async def add_resources(store: Store, body: wire.NewResources) -> ResourcesUpdate:
    return await store.add_resources(decode_resources(body.resources), body.resources_id)


@router.get("/resources", summary="Versions of resources")
async def list_resources(store: Store, query: Annotated[queries.ResourcesQuery, Query()]) -> Response:
    return _page(await store.query_resources(**query.given()))


@router.post("/resources/search", summary="Versions of resources")
async def search_resources(store: Store, body: queries.ResourcesQuery) -> Response:
    return _page(await store.query_resources(**body.given()))


@router.get("/resources/latest", summary="The latest resources", response_model=None)
async def latest_resources(store: Store) -> Response:
    return _found(await store.get_latest_resources(), "There are no resources in the store yet.")


@router.get("/resources/{resources_id}", summary="Resources by id", response_model=None)
async def get_resources(store: Store, resources_id: str) -> Response:
    found = await store.get_resources_by_id(resources_id)
    return _found(found, f"There are no resources '{resources_id}' in the store.")


@router.put("/resources/{resources_id}", summary="Insert or replace resources; the version grows by one")
async def update_resources(store: Store, resources_id: str, body: wire.NewResources) -> ResourcesUpdate:
    return await store.update_resources(resources_id, decode_resources(body.resources))


@router.get("/workers", summary="Workers")
async def list_workers(store: Store, query: Annotated[queries.WorkerQuery, Query()]) -> Response:
    return _page(await store.query_workers(**query.given()))


@router.post("/workers/search", summary="Workers")
async def search_workers(store: Store, body: queries.WorkerQuery) -> Response:
    return _page(await store.query_workers(**body.given()))


@router.get("/workers/{worker_id}", summary="A worker", response_model=None)
async def get_worker(store: Store, worker_id: str) -> Response:
    return _found(await store.get_worker_by_id(worker_id), f"There is no worker '{worker_id}' in the store.")


@router.post("/workers/{worker_id}", summary="A worker's heartbeat; keeps its attempts alive too")
async def heartbeat(store: Store, worker_id: str, body: wire.Heartbeat) -> Worker:
    given = body.heartbeat_stats
    return await store.update_worker(worker_id, UNSET if given is None else given, body.attempt_ids)


@router.post("/workers/{worker_id}/release", summary="Give back what a worker holds that is gone")
async def release_worker(store: Store, worker_id: str, body: wire.Release) -> int:
    return await store.release_worker(worker_id, body.error, quiet_seconds=body.quiet_seconds)


@router.post("/workers/{worker_id}/presence", summary="Kept open by a worker, whose end it shows", status_code=204)
async def presence(request: Request, worker_id: str, body: wire.Presence) -> None:
    await request.app.state.attendance.stay(request, worker_id, body.timeout)


# ---- runs ------------------------------------------------------------------------------------------------------------


@router.post("/runs", summary="Store a run that begins or goes on")
async def begin_run(store: Store, body: wire.BeginRun) -> Run:
    return await store.begin_run(body.run, first_step=body.first_step)


@router.get("/runs", summary="Runs")
async def list_runs(store: Store, query: Annotated[queries.RunQuery, Query()]) -> Response:
    return _page(await store.query_runs(**query.given()))


@router.post("/runs/search", summary="Runs")
async def search_runs(store: Store, body: queries.RunQuery) -> Response:
    return _page(await store.query_runs(**body.given()))


@router.post("/runs/events", summary="Append what runs measured or said")
async def add_run_events(store: Store, body: list[RunEvent]) -> None:
    await store.add_run_events(body)


@router.get("/runs/{run_id}", summary="A run", response_model=None)
async def get_run(store: Store, run_id: str) -> Response:
    return _found(await store.get_run_by_id(run_id), f"There is no run '{run_id}' in the store.")


@router.post("/runs/{run_id}", summary="Say where a run stands")
async def update_run(store: Store, run_id: str, body: wire.UpdateRun) -> Run:
    return await store.update_run(run_id, **_given(body))


@router.get("/runs/{run_id}/events", summary="What a run measured and said")
async def list_run_events(store: Store, run_id: str, query: Annotated[queries.RunEventQuery, Query()]) -> Response:
    return _page(await store.query_run_events(run_id, **query.given()))


@router.post("/runs/{run_id}/events/search", summary="What a run measured and said")
async def search_run_events(store: Store, run_id: str, body: queries.RunEventQuery) -> Response:
    return _page(await store.query_run_events(run_id, **body.given()))


# ---- the store itself ------------------------------------------------------------------------------------------------


@router.get("/health", summary="Is the server there?")
async def health() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/statistics", summary="Counts per status")
async def statistics(store: Store) -> Statistics:
    return await store.statistics()


# ---- the application -------------------------------------------------------------------------------------------------


def _given(body: wire.Body) -> dict[str, Any]:
    """The fields that the client gave."""
    return {name: value for name, value in body.__dict__.items() if name in body.model_fields_set}


def _page(page: Any) -> Response:
    return Response(page.model_dump_json(), media_type="application/json")


def _found(record: Any, otherwise: str) -> Response:
    if record is None:
        return problem(404, otherwise)
    return Response(record.model_dump_json(), media_type="application/json")


async def on_error(request: Request, error: Exception) -> Response:
    return problem(_status_of(error), str(error))


async def on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError | ValidationError)
    parts = [": ".join(filter(None, (".".join(map(str, i["loc"])), i["msg"]))) for i in error.errors()]
    return problem(422, "The request is not valid: " + "; ".join(parts))


async def on_bug(request: Request, error: Exception) -> Response:
    # The traceback is for the log of the server, never for its clients.
    return problem(500, "The server failed; its log says why.")


def create_app(store: SqlLightningStore, intake: Intake, attendance: Attendance) -> FastAPI:
    """The ASGI application, without keys: see `access` for those."""
    # The routes as they are: including a router builds all of them anew at the first request of every server (0.1 s).
    routes = [*router.routes, *otlp.router.routes, *prometheus.router.routes]
    app = FastAPI(title="Agent Lightning store", version="1", docs_url="/docs", redoc_url=None, routes=routes)
    app.state.store = store
    app.state.intake = intake
    app.state.attendance = attendance
    app.add_exception_handler(StoreError, on_error)
    app.add_exception_handler(ConfigError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(Exception, on_bug)
    return app
