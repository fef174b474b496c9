"""The endpoints that carry the load, answered without the web framework, which costs more than the store does.

They call the same functions as `api`, which also describes them in its OpenAPI document; only reading the body and
writing the answer is done here.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request, Response
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from agentlightning.errors import ConfigError, StoreError
from agentlightning.store.http import api, wire
from agentlightning.store.http.intake import Intake
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Attempt, AttemptedRollout, Rollout, Worker

logger = logging.getLogger(__name__)


class Hot(NamedTuple):
    """How to read a body, what to do, and how to write the answer (None: there is none, or it is written already)."""

    read: Callable[[bytes], Any]
    work: Callable[[Request, SqlLightningStore, Any], Awaitable[Any]]
    write: Callable[[Any], bytes] | None


def _json(kind: Any) -> Callable[[Any], bytes]:
    return TypeAdapter(kind).dump_json


SPANS = wire.PREFIX + "/spans"

HOT: dict[str, Hot] = {
    "/queues/rollouts/enqueue": Hot(
        wire.Enqueue.model_validate_json, lambda _, store, body: api.enqueue(store, body), _json(list[Rollout])
    ),
    "/queues/rollouts/dequeue": Hot(wire.Dequeue.model_validate_json, api.dequeue, _json(list[AttemptedRollout])),
    "/attempts/update": Hot(
        TypeAdapter(list[wire.AttemptChange]).validate_json,
        lambda _, store, body: api.update_attempts(store, body),
        _json(list[Attempt | wire.Problem]),
    ),
    "/waits/rollouts": Hot(wire.Wait.model_validate_json, api.wait, wire.rollout_list.dump_json),
    "/calls": Hot(wire.decode_records, lambda _, store, records: store.add_calls(records), None),
}


NAMED: dict[tuple[str, str], Hot] = {
    ("POST", "/workers"): Hot(
        wire.Heartbeat.model_validate_json,
        lambda request, store, body: api.heartbeat(store, _last_of(request.scope["path"]), body),
        _json(Worker),
    ),
    ("GET", "/resources"): Hot(
        lambda _: None,
        lambda request, store, _: api.get_resources(store, _last_of(request.scope["path"])),
        None,
    ),
}
"""Those of one worker or one resource, whose id follows."""
_NO_IDS = ("", "search", "latest")


def _last_of(path: str) -> str:
    return path.rpartition("/")[2]


class HotPaths:
    """An ASGI middleware in front of `api`'s application."""

    def __init__(self, app: ASGIApp, store: SqlLightningStore, intake: Intake):
        self._app = app
        self._store = store
        self._intake = intake
        exact = {wire.PREFIX + path: partial(self._hot, hot) for path, hot in HOT.items()}
        self._exact: dict[str, Callable[[Request], Awaitable[Response]]] = {**exact, SPANS: self._spans}
        self._named = {(method, wire.PREFIX + path): partial(self._hot, hot) for (method, path), hot in NAMED.items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        response = await answered(request, answer(request))
        await response(scope, receive, send)

    def _answer(self, method: str, path: str) -> Callable[[Request], Awaitable[Response]] | None:
        if method == "POST" and path in self._exact:
            return self._exact[path]
        before, _, last = path.rpartition("/")
        return None if last in _NO_IDS else self._named.get((method, before))

    async def _spans(self, request: Request) -> Response:
        return await self._intake.spans(request, await request.body())

    async def _hot(self, hot: Hot, request: Request) -> Response:
        result = await hot.work(request, self._store, hot.read(await request.body()))
        if isinstance(result, Response):
            return result
        if hot.write is None:
            return Response(status_code=204)
        return Response(hot.write(result), media_type="application/json")


async def answered(request: Request, answering: Awaitable[Response]) -> Response:
    """The answer, or what went wrong."""
    try:
        return await answering
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    except ValidationError as error:
        return await api.on_invalid(request, error)
    except (StoreError, ConfigError) as error:
        return await api.on_error(request, error)
    except Exception as error:  # a bug: the client gets an answer, the log the traceback
        logger.exception("%s failed", request.url.path)
        return await api.on_bug(request, error)
