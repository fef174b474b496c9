"""The training server: the routes of the API, and behind them the models that are served under their names."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Scope, Send

from agentlightning.errors import AgentLightningError, ConfigError, GatewayError, GraderRefused
from agentlightning.files import make_folder
from agentlightning.finetuning.files import Blobs, Files
from agentlightning.finetuning.graders import HttpModels
from agentlightning.finetuning.graders.settings import owners_settings
from agentlightning.finetuning.jobs import Jobs, Quotas
from agentlightning.finetuning.keys import Keys
from agentlightning.finetuning.models import Catalog, Pool
from agentlightning.finetuning.queue import TRAINING, FineTuningQueue
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.records import Records, Row
from agentlightning.finetuning.routes import ROUTES, ApiCall, Handler, as_response
from agentlightning.finetuning.tinker.application import application
from agentlightning.finetuning.tinker.routes import KEY_PREFIX, PREFIX as TINKER_PREFIX
from agentlightning.finetuning.tinker.service import TinkerService
from agentlightning.finetuning.training import MODELS_KEY, MODELS_URL
from agentlightning.finetuning.wire import unwritable
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.base import openai_error
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.serving.anonymous import ReadAhead, replayed
from agentlightning.gateway.serving.http import DisconnectedError, api_key, headers_of, send_json, with_request_id
from agentlightning.keys import not_empty
from agentlightning.net.guard import is_local_name
from agentlightning.net.server import Busy, ConnectionLimits, LoopServer, asks_for_health

logger = logging.getLogger(__name__)

PREFIX = "/v1"
_CALLS = frozenset(path for dialect in DIALECTS for path in dialect.paths if "{" not in path)
"""Paths of calls whose body names the model."""
_LIMITS = ConnectionLimits(body_seconds=900.0)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a training server is set up."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_key: str | None = None
    """None: whoever reaches the server is the admin, which only loopback allows."""
    allow_hosts: Sequence[str] = ()
    loaded_models: int = 2
    """Models that are served at the same time."""
    max_context: int = 4096
    quotas: Quotas = field(default_factory=Quotas)
    agents: Mapping[str, str] = field(default_factory=dict)
    """Agents that jobs may train, by name: `file.py:agent`, or a command."""
    command: Sequence[str] = TRAINING
    """What trains the job in the folder that is its last argument."""


class TrainingServer:
    """A server on one folder: `files`, `runs` with a folder for each job, and `records.db`."""

    def __init__(self, folder: Path, bases: Mapping[str, BaseModel], settings: ServerSettings | None = None) -> None:
        """Raises ConfigError."""
        settings = settings or ServerSettings()
        not_empty(settings.admin_key, "The admin key")
        if settings.admin_key is None and not is_local_name(settings.host):
            raise ConfigError(f"Listening on {settings.host} lets others in: give an admin key (--api-key).")
        make_folder(folder)
        self.records = Records(folder / "records.db", settings.quotas.records)
        self.quotas = settings.quotas
        self.blobs = Blobs(folder / "files")
        self.files = Files(self.records, self.blobs)
        self.catalog = Catalog(bases)
        find = self.catalog.for_job
        self.jobs = Jobs(self.records, self.files, folder / "runs", find, settings.quotas, settings.agents)
        self.catalog.jobs = self.jobs
        self.catalog.sweep()
        self.keys = Keys(self.records, settings.admin_key)
        self.queue = FineTuningQueue(self.jobs, self.blobs, self._models_of, settings.command)
        self.pool = Pool(settings.loaded_models, settings.max_context)
        self.tinker = TinkerService(
            bases, self.records, folder / "tinker", settings.loaded_models, settings.max_context
        )
        self._tinker = application(self.tinker, self.keys)
        self.catalog.saved = self.tinker.saved
        self.tinker.on_delete = lambda folder: self.pool.forget_below(folder)
        self.jobs.check_checkpoints = self.tinker.archive.check_quota = self._check_checkpoints
        self._ahead = ReadAhead()
        self._own_keys: dict[str, str] = {}
        self._routes = Starlette(
            routes=[StarletteRoute(PREFIX + r.path, self._answer(r.handler), methods=[r.method]) for r in ROUTES],
            exception_handlers={HTTPException: _nowhere},
        )
        self._busy = Busy(_LIMITS)
        self._server = self._made_server(settings)
        self._task: asyncio.Task[None] | None = None

    def _made_server(self, settings: ServerSettings) -> LoopServer:
        return LoopServer(
            self,
            settings.host,
            settings.port,
            what="training server",
            error=GatewayError,
            limits=_LIMITS,
            trusted=self._is_trusted,
            allow_hosts=settings.allow_hosts,
            forms=True,
        )

    @property
    def endpoint(self) -> str:
        """The base URL for clients."""
        host = self._server.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}{PREFIX}"

    def _check_checkpoints(self, owner: str) -> None:
        """Raises `Refusal` where the checkpoints of a key take what they may."""
        used = self.jobs.checkpoint_bytes(owner) + self.tinker.archive.stored_bytes(owner)
        if used >= self.quotas.checkpoint_bytes:
            raise Refusal(
                f"The checkpoints of this key take {used} bytes, and they may take {self.quotas.checkpoint_bytes} "
                "(checkpoint_bytes). Delete models or checkpoints that are no longer needed.",
                status=429,
                kind="rate_limit_error",
                code="storage_exceeded",
            )

    async def start(self) -> None:
        """Listen, and go on with the jobs that there are. Raises GatewayError if the port is taken."""
        await self._server.start()
        self.tinker.start()
        self._task = asyncio.create_task(self.queue.run(), name="fine-tuning-queue")

    async def watch(self) -> None:
        """Wait until the queue ends, which it does not by itself."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Let the job that runs write a checkpoint, and end all."""
        await self.queue.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._server.stop()
        await self.tinker.close()
        await self.pool.close()
        self.records.close()

    @contextmanager
    def _models_of(self, job: Row) -> Iterator[Mapping[str, str]]:
        """A job's graders ask models of this server, as its owner may."""
        key = self.keys.lend(job["owner"])
        try:
            yield {MODELS_URL: self.endpoint, MODELS_KEY: key}
        finally:
            self.keys.take_back(key)

    def models(self, owner: str) -> HttpModels:
        """What a grader asks that a request brings. The key that it uses is good as long as the server."""
        if owner not in self._own_keys:
            self._own_keys[owner] = self.keys.lend(owner)
        return HttpModels(self.endpoint, self._own_keys[owner], provider=lambda name: owners_settings().provider(name))

    def _is_trusted(self, scope: Scope) -> bool:
        """Whether a request may have a connection in reserve."""
        return asks_for_health(scope) or self.keys.is_admin(api_key(headers_of(scope)).removeprefix(KEY_PREFIX))

    # ---- requests --------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        send = with_request_id(send)
        given = api_key(headers_of(scope)).removeprefix(KEY_PREFIX)
        if scope["path"].endswith("/health"):
            await send_json(send, 200, {"status": "ok"})
            return
        with self._busy.one(given) as fits:
            if fits or self.keys.is_admin(given):
                await self._route(scope, receive, send)
                return
            refusal = Refusal(self._busy.refusal, status=429, kind="rate_limit_error", code="too_many_connections")
            await send_json(send, 429, openai_error(refusal) | {"detail": refusal.message})

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] == "POST" and path.startswith(PREFIX) and path.removeprefix(PREFIX) in _CALLS:
            await self._call(scope, receive, send)
        elif path.startswith(f"{TINKER_PREFIX}/"):
            await self._tinker(scope, receive, send)
        else:
            await self._routes(scope, receive, send)

    def _answer(self, handler: Handler) -> Any:
        async def answer(request: Request) -> Response:
            try:
                owner = self.keys.owner(api_key(headers_of(request.scope)))
                return as_response(await handler(ApiCall(self, request, owner)))
            except Refusal as refusal:
                return _refused(refusal)
            except GraderRefused as refused:
                return _refused(Refusal(str(refused), param=refused.param, code="invalid_grader"))
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception as error:  # a fault of ours: the client learns that it is none of its own
                if (full := unwritable(error)) is not None:
                    logger.error(full.message)
                    return _refused(full)
                logger.exception("%s %s could not be answered", request.method, request.url.path[:200])
                words = "The server failed to answer. What happened is in its log."
                return _refused(Refusal(words, status=500, kind="server_error", code="server_error"))

        return answer

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call of the model that its body names."""
        headers = headers_of(scope)
        try:
            given = api_key(headers)
            owner = self.keys.owner(given)
            body = await self._ahead.read(given.encode(), headers, receive)
            if body is None:
                raise Refusal("The body is too long.", status=413, code="body_too_large")
            base = self.catalog.find(owner, _model_in(body))
            async with self.pool.serving(base) as access:
                await access(scope, replayed(body, receive), send)
        except DisconnectedError:
            return
        except Refusal as refusal:
            await send_json(send, refusal.status, openai_error(refusal))
        except AgentLightningError as error:
            refusal = Refusal(f"The model cannot be loaded: {error}", status=503, kind="server_error")
            await send_json(send, 503, openai_error(refusal))


def _model_in(body: bytes) -> str:
    class Named(msgspec.Struct):
        model: str

    try:
        return msgspec.json.decode(body, type=Named).model
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise Refusal("The body is no JSON with a model.", param="model", code="invalid_json") from None


def _refused(refusal: Refusal) -> Response:
    headers = {"x-should-retry": "false"} if refusal.status in (409, 429) else {}
    body = msgspec.json.encode(openai_error(refusal))
    return Response(body, status_code=refusal.status, media_type="application/json", headers=headers)


async def _nowhere(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"There is no {request.method} {request.url.path[:200]} here. {_instead(request)}"
    return _refused(Refusal(words, status=error.status_code, code="not_found"))


def _instead(request: Request) -> str:
    """What there is in place of a route that there is not."""
    path, host = request.url.path.rstrip("/"), f"{request.url.scheme}://{request.url.netloc}"
    shapes = {route: re.sub(r"\{[^}]*\}", "[^/]+", PREFIX + route.path) for route in ROUTES}
    if takes := [route.method for route, shape in shapes.items() if re.fullmatch(shape, path)]:
        return f"It takes {' and '.join(takes)}."
    if TINKER_PREFIX in path:
        return f"Clients of tinker take the address without a path: {host}"
    paths = dict.fromkeys([*(route.path.replace(":path", "") for route in ROUTES), *sorted(_CALLS)])
    if any(path.endswith(known) for known in paths):
        return f"Clients take as their base URL {host}{PREFIX}"
    return f"There are {', '.join(f'{PREFIX}{known}' for known in paths if '{' not in known)}."
