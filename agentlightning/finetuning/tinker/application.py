"""The API as an ASGI application: who asks, which route answers, and how a refusal or a fault is answered."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from agentlightning.finetuning.keys import Keys
from agentlightning.finetuning.tinker.data import turn_of
from agentlightning.finetuning.tinker.routes import KEY_PREFIX, PREFIX, ROUTES, TinkerCall, TinkerRoute
from agentlightning.finetuning.tinker.service import TinkerService
from agentlightning.finetuning.wire import unwritable
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.serving.http import api_key, headers_of

logger = logging.getLogger(__name__)

_PROTOBUF = "application/x-protobuf"
_COMES_AGAIN = (408, 409, 429)
"""Refusals after which a client sends the same request again; after others it goes on with its next one."""


def application(service: TinkerService, keys: Keys) -> Starlette:
    """The ASGI application of all routes."""
    secret = secrets.token_bytes(32)

    def answers(route: TinkerRoute) -> Any:
        async def answer(request: Request) -> Response:
            owner = ""
            try:
                given = api_key(headers_of(request.scope))
                owner = "" if route.open else keys.owner(given, given.removeprefix(KEY_PREFIX))
                return _response(await route.handler(TinkerCall(service, request, owner, secret)))
            except Refusal as refusal:
                if refusal.status not in _COMES_AGAIN:
                    await _give_up_turn(service, owner, getattr(request.state, "body", b""))
                return _json({"detail": refusal.message}, refusal.status)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # a fault of ours: the client learns that it is none of its own
                if (full := unwritable(error)) is not None:
                    logger.error(full.message)
                    return _json({"detail": full.message}, full.status)
                logger.exception("%s %s could not be answered", request.method, request.url.path[:200])
                return _json({"detail": "The server failed to answer. What happened is in its log."}, 500)

        return answer

    routes = [Route(PREFIX + r.path, answers(r), methods=[r.method]) for r in ROUTES]
    return Starlette(routes=routes, exception_handlers={HTTPException: _nowhere})


async def _give_up_turn(service: TinkerService, owner: str, body: bytes) -> None:
    """A request of a training client was refused: the one behind it does not wait for its turn."""
    if (named := await asyncio.to_thread(turn_of, body)) is not None:
        client = service.training.get(named[0])
        if client is not None and client.owner == owner:
            client.turns.give_up(named[1])


def _response(found: Any) -> Response:
    if isinstance(found, Response):
        return found
    if isinstance(found, bytes):
        return Response(found, media_type=_PROTOBUF)
    return _json(found, 200)


def _json(found: Any, status: int) -> Response:
    return Response(msgspec.json.encode(found), status_code=status, media_type="application/json")


async def _nowhere(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"There is no {request.method} {request.url.path[:200]} on this server; docs/tinker.md lists what there is."
    return _json({"detail": words}, error.status_code)
