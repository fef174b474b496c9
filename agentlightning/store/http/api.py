"""The server's side of `table`: an ASGI application that finds the operation of a request, reads its body, calls the
store, and writes the answer.

Who may call what is in `access`; errors are problem details that say what to do next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from agentlightning.errors import ConfigError, ConflictError, NotFoundError, StoreError, StoreUnavailableError
from agentlightning.store.http import prometheus, size, wire
from agentlightning.store.http.attendance import Attendance
from agentlightning.store.http.intake import Intake
from agentlightning.store.http.openapi import document, page
from agentlightning.store.http.problems import describe, problem
from agentlightning.store.http.table import (
    AttemptChangeItem,
    HttpOperation,
    NextSequence,
    PresenceBody,
    Wait,
    find,
    verbs_of,
)
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Attempt, PaginatedResult, Rollout

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
    """The ASGI application, without keys: see `access` for those."""

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
        return prometheus.render(await self._store.statistics()).encode()


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
    if isinstance(answer, PaginatedResult):  # its items may be of kinds below the one that is said
        answer = answer.model_dump_json()
    elif not isinstance(answer, bytes):
        answer = operation.answers.dump_json(answer)
    return Response(answer, media_type=operation.gives)


def _nowhere(verb: str, path: str) -> Response:
    if verb == "GET" and path == "/openapi.json":
        return Response(msgspec.json.encode(document()), media_type=wire.JSON)
    if verb == "GET" and path == "/docs":
        return HTMLResponse(page())
    if allowed := verbs_of(path):
        refusal = problem(405, f"{path} takes {' and '.join(allowed)}, not {verb}.")
        refusal.headers["allow"] = ", ".join(allowed)
        return refusal
    return problem(404, f"{wire.NOTHING_AT} {path}; /docs lists what there is.")


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
    """The answer, or what went wrong."""
    try:
        return await answering
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except (StoreError, ConfigError) as error:
        return problem(_status_of(error), str(error), error.code)
    except Exception:  # a bug: the client gets an answer, the log the traceback
        logger.exception("%s failed", request.url.path)
        return problem(500, "The server failed; its log says why.")
