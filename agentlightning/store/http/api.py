"""The server's side of `table`: an ASGI application that finds the operation of a request, reads its body, calls the
store, and writes the answer. It also serves the store's counts as Prometheus metrics, and the OpenAPI document of the
operations with a page that shows it to people.

Who may call what is in `server`; errors are problem details that say what to do next.

`Attendance` knows which workers are connected: each keeps one request open, and the end of its connection is known at
once. What a worker holds is given back soon after, unless it was heard of again meanwhile. The connection of a machine
that vanishes without a word ends when the machine answers no probe of the server's system any more. A worker without
such a request is found by its leases.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from html import escape
from typing import Any, TypeVar

import msgspec
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.store.base import Statistics
from agentlightning.store.http import size, wire
from agentlightning.store.http.intake import Intake
from agentlightning.store.http.problems import PROBLEM, TITLES, describe, problem
from agentlightning.store.http.table import (
    OPERATIONS,
    AttemptChangeItem,
    HttpOperation,
    Named,
    NextSequence,
    PresenceBody,
    Wait,
    find,
    verbs_of,
)
from agentlightning.store.http.wire import Problem
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Attempt, PaginatedResult, Resource, Rollout

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


class StoreApi:
    """The ASGI application, without keys: see `server` for those."""

    def __init__(self, store: SqlLightningStore, intake: Intake, attendance: Attendance) -> None:
        self._store = store
        self._intake = intake
        self._attendance = attendance
        self._own: dict[str, Callable[[Request, Any], Awaitable[Any]]] = {
            "wait_for_rollouts": self._wait,
            "update_attempts": self._update_attempts,
            "add_many_spans": intake.spans,
            "add_traces": intake.traces,
            "get_many_span_sequence_ids": self._sequence_ids,
            "add_calls": self._add_calls,
            "query_calls": self._calls,
            "query_records": self._records,
            "stay": self._stay,
            "add_run_events": lambda _, events: store.add_run_events(events),
            "health": self._health,
            "metrics": self._metrics,
        }
        """What is not one call of the store's method of that name."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await (await answered(request, self._answer(request)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        verb, path = request.method, request.scope["path"]
        found = find(verb, path)
        if found is None:
            return _nowhere(verb, path)
        operation, ids = found
        request.scope["path_params"] = ids
        body: Any = await _body(operation, request)
        if (own := self._own.get(operation.name)) is not None:
            working = own(request, body)
        else:
            fields = {} if body is None else body.given()
            working = getattr(self._store, operation.name)(**ids, **fields)
        if operation.waits and body is not None and body.timeout:
            working = while_connected(request, working)
        return _written(operation, ids, await working)

    async def _wait(self, request: Request, body: Wait) -> list[Rollout]:
        wait_for = self._store.wait_for_any_rollout if body.any else self._store.wait_for_rollouts
        return list(await wait_for(rollout_ids=body.rollout_ids, timeout=body.timeout))

    async def _update_attempts(self, request: Request, body: list[AttemptChangeItem]) -> list[Attempt | wire.Problem]:
        updates = [self._store.update_attempt(one.rollout_id, one.attempt_id, **one.change.given()) for one in body]
        results = await asyncio.gather(*updates, return_exceptions=True)
        return [result if isinstance(result, Attempt) else _problem_of(result) for result in results]

    async def _sequence_ids(self, request: Request, body: list[NextSequence]) -> list[int]:
        pairs = [(one.rollout_id, one.attempt_id) for one in body]
        return list(await self._store.get_many_span_sequence_ids(pairs))

    async def _add_calls(self, request: Request, body: bytes) -> None:
        await self._store.add_calls(wire.decode_records(body))

    async def _calls(self, request: Request, body: Any) -> bytes:
        return wire.encode_table(await self._store.fetch_calls(**body.given()))

    async def _records(self, request: Request, body: Any) -> bytes:
        return wire.encode_record_table(await self._store.fetch_records(**body.given()))

    async def _stay(self, request: Request, body: PresenceBody) -> None:
        await self._attendance.stay(request, request.path_params["worker_id"], body.timeout)

    async def _health(self, request: Request, body: None) -> dict[str, str]:
        return {"status": "ok"}

    async def _metrics(self, request: Request, body: None) -> bytes:
        return render(await self._store.statistics()).encode()


async def _body(operation: HttpOperation, request: Request) -> Any:
    if operation.body is None:
        return None
    if request.method == "GET":
        return operation.read_query(request.query_params.multi_items())
    body = await request.body()
    # The intake reads spans itself, long ones in a process of their own.
    return body if operation.body is bytes or operation.name == "add_many_spans" else operation.read(body)


def _written(operation: HttpOperation, ids: dict[str, str], answer: Any) -> Response:
    if isinstance(answer, Response):
        return answer
    if answer is None:
        missing = operation.otherwise
        return Response(status_code=204) if missing is None else problem(404, missing.format(**ids))
    if isinstance(answer, PaginatedResult):  # its items may be of subclasses of the kind in the table
        answer = answer.model_dump_json()
    elif not isinstance(answer, bytes):
        answer = operation.answers.dump_json(answer)
    return Response(answer, media_type=operation.gives)


def _nowhere(verb: str, path: str) -> Response:
    if verb == "GET" and path == "/openapi.json":
        return Response(msgspec.json.encode(document()), media_type=wire.JSON)
    if verb == "GET" and path == "/docs":
        return HTMLResponse(_page())
    if allowed := verbs_of(path):
        refusal = problem(405, f"{path} takes {' and '.join(allowed)}, not {verb}.")
        refusal.headers["allow"] = ", ".join(allowed)
        return refusal
    return problem(404, f"{wire.NOTHING_AT} {path}; /docs lists what there is.")


async def while_connected(request: Request, waiting: Awaitable[T]) -> T:
    """A long poll that is cancelled when its client goes away, so that no rollout is handed to nobody."""
    task = asyncio.ensure_future(waiting)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if task.cancelled():
            raise StoreUnavailableError("The client disconnected before there was an answer.")
        return await task
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _status_of(error: BaseException) -> int:
    return next(code for kind, code in STATUS_OF.items() if isinstance(error, kind))


def _problem_of(error: BaseException) -> wire.Problem:
    if not isinstance(error, StoreError):
        raise error
    return describe(_status_of(error), str(error), error.code)


async def answered(request: Request, answering: Awaitable[Response]) -> Response:
    """The answer, or a problem document for what went wrong."""
    try:
        return await answering
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except (StoreError, ConfigError) as error:
        return problem(_status_of(error), str(error), error.code)
    except Exception:  # a bug: the client gets an answer, the log the traceback
        logger.exception("%s failed", request.url.path)
        return problem(500, "The server failed; its log says why.")


_QUIET_SECONDS = 12.0
"""A worker that lives sends heartbeats more often than that, by whichever connection."""


class Attendance:
    """The open requests of connected workers, of one server; `close` ends them."""

    def __init__(self, store: SqlLightningStore) -> None:
        self._store = store
        self._closed = False
        self._staying: set[asyncio.Future[None]] = set()
        """The open requests: `close` ends each."""
        self._releasing: set[asyncio.Task[None]] = set()

    async def stay(self, request: Request, worker_id: str, seconds: float) -> None:
        """Wait so many seconds, or until the worker's connection ends."""
        ended = asyncio.ensure_future(_until_disconnected(request))
        closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._staying.add(closed)
        try:
            await asyncio.wait({ended, closed}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not self._closed:
                task = asyncio.create_task(self._release(worker_id))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)
        finally:
            self._staying.discard(closed)
            for waiting in (ended, closed):
                waiting.cancel()

    async def _release(self, worker_id: str) -> None:
        await asyncio.sleep(_QUIET_SECONDS)
        error = f"The connection of worker {worker_id} ended, and it was not heard of again."
        with suppress(StoreError):  # then its leases run out
            if count := await self._store.release_worker(worker_id, error, quiet_seconds=_QUIET_SECONDS):
                logger.warning("%s Its %d attempts are handed out again.", error, count)

    async def close(self) -> None:
        self._closed = True
        for staying in self._staying:
            staying.cancel()
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def render(values: Statistics) -> str:
    """The text format of Prometheus, version 0.0.4."""
    lines: list[str] = []

    def metric(name: str, kind: str, about: str, samples: dict[str, float]) -> None:
        lines.append(f"# HELP agl_{name} {about}")
        lines.append(f"# TYPE agl_{name} {kind}")
        lines.extend(f"agl_{name}{labels} {value}" for labels, value in samples.items())

    def by_status(counts: dict[str, int]) -> dict[str, float]:
        return {f'{{status="{status}"}}': count for status, count in counts.items()}

    metric("rollouts", "gauge", "Rollouts by status.", by_status(values["rollouts"]))
    metric("attempts", "gauge", "Attempts by status.", by_status(values["attempts"]))
    metric("spans", "gauge", "Stored spans.", {"": values["total_spans"]})
    metric("calls", "gauge", "Stored model calls.", {"": values["total_calls"]})
    metric("resources", "gauge", "Stored resources.", {"": values["total_resources"]})
    metric("workers", "gauge", "Workers ever heard of.", {"": values["total_workers"]})
    metric("uptime_seconds", "counter", "Seconds since the store was opened.", {"": values["uptime_seconds"]})
    return "\n".join(lines) + "\n"


_REF = "#/components/schemas/{}"
_BINARY = {"type": "string", "format": "binary"}
_STYLE = "body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}pre{overflow:auto}"


@cache
def document() -> dict[str, Any]:
    """The document as JSON values."""
    records: dict[str, TypeAdapter[Any]] = {"": TypeAdapter(Problem)}

    def of_record(kind: Any) -> dict[str, Any]:
        if kind is Named:
            return {"type": "object", "additionalProperties": of_record(Resource)}
        records[kind.__name__] = TypeAdapter(kind)
        return {"$ref": _REF.format(kind.__name__)}

    with_body = [one for one in OPERATIONS if one.body not in (None, bytes)]
    bodies, components = msgspec.json.schema_components(
        [one.body for one in with_body], schema_hook=of_record, ref_template=_REF.replace("{}", "{name}")
    )
    body_of = dict(zip(with_body, bodies, strict=True))
    answers = {one: one.answers for one in OPERATIONS if one.answer not in (None, bytes)}
    kinds: list[Any] = [(key, "validation", one) for key, one in {**records, **answers}.items()]
    schemas, definitions = TypeAdapter.json_schemas(kinds, ref_template=_REF.replace("{}", "{model}"))
    components |= definitions.get("$defs", {})
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        answer = schemas.get((one, "validation"))
        paths.setdefault(one.path, {})[one.verb.lower()] = _described(one, body_of.get(one), answer, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Agent Lightning store", "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(one: HttpOperation, body: Any, answer: Any, components: dict[str, Any]) -> dict[str, Any]:
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in one.ids]
    operation: dict[str, Any] = {"operationId": f"{one.name}_{one.verb.lower()}", "summary": one.summary}
    if one.body is not None and one.verb == "GET":
        query = components[one.body.__name__]
        parameters += [
            {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
            for name, schema in query["properties"].items()
        ]
    elif one.body is not None:
        operation["requestBody"] = {"required": True, "content": {one.takes: {"schema": body or _BINARY}}}
    if parameters:
        operation["parameters"] = parameters
    good = {"description": "Done"} if one.answer is None else _content(one.gives, answer or _BINARY, "As wanted")
    problems = {str(code): _content(PROBLEM, {"$ref": _REF.format("Problem")}, TITLES[code]) for code in _PROBLEMS}
    operation["responses"] = {"204" if one.answer is None else "200": good, **problems}
    return operation


_PROBLEMS = (404, 409, 422, 503)


def _content(media: str, schema: Any, description: str) -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": schema}}}


def _page() -> str:
    """The page for people: each operation with what it takes and gives."""
    whole = document()
    parts = [
        f"<h3><code>{verb.upper()} {escape(path)}</code></h3><p>{escape(operation['summary'])}</p>"
        f"<details><summary>Details</summary><pre>{_shown(operation)}</pre></details>"
        for path, verbs in whole["paths"].items()
        for verb, operation in verbs.items()
    ]
    parts += [
        f'<h3 id="{escape(name)}">{escape(name)}</h3><pre>{_shown(schema)}</pre>'
        for name, schema in whole["components"]["schemas"].items()
    ]
    title = whole["info"]["title"]
    head = f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
    return f"{head}<h1>{title}</h1>{''.join(parts)}"


def _shown(value: Any) -> str:
    text = escape(msgspec.json.format(msgspec.json.encode(value)).decode(), quote=False)
    return re.sub(r"#/components/schemas/([\w\[\]]+)", r'<a href="#\1">\1</a>', text)
