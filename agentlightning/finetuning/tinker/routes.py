"""The routes of the API, a row each: method, path below /api/v1, and what answers it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route as StarletteRoute

from agentlightning.finetuning.keys import Keys
from agentlightning.finetuning.tinker import requests
from agentlightning.finetuning.tinker.archive import number_in
from agentlightning.finetuning.tinker.data import read_request
from agentlightning.finetuning.tinker.service import Session, TinkerService, TrainingClient
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.serving.http import api_key, headers_of
from agentlightning.models import resolve_model

logger = logging.getLogger(__name__)

PREFIX = "/api/v1"
KEY_PREFIX = "tml-"
"""The client takes only keys that begin so; one of this server is given to it with this in front."""
_MOST_BODY = 64 << 20
_PROTOBUF = "application/x-protobuf"
_URL_SECONDS = 3600


@dataclass(frozen=True)
class TinkerCall:
    """A request, and whose it is."""

    service: TinkerService
    request: Request
    owner: str
    secret: bytes

    def path(self, name: str) -> str:
        return self.request.path_params[name]

    async def body(self) -> bytes:
        """Raises `Refusal` for one that is too long."""
        found = bytearray()
        async for piece in self.request.stream():
            found += piece
            if len(found) > _MOST_BODY:
                raise Refusal(f"The body has more than {_MOST_BODY} bytes.", status=413, code="body_too_large")
        return bytes(found)

    async def read(self, kind: type[requests.Body]) -> requests.Body:
        return requests.read(await self.body(), kind)


Handler = Callable[[TinkerCall], Awaitable[Any]]


# ---- service and sessions --------------------------------------------------------------------------------------------


async def healthz(call: TinkerCall) -> Any:
    return {"status": "ok"}


async def client_config(call: TinkerCall) -> Any:
    """How the client is to behave where it leaves that to the server: a loss of one's own is computed by itself."""
    await call.body()
    return {
        "pjwt_auth_enabled": False,
        "proto_compress_fwdbwd": False,
        "parallel_fwdbwd_chunks": True,
        "sample_use_retrieve_futures": False,
        "sample_join_sampling_session": False,
        "custom_loss_server_side": False,
    }


async def capabilities(call: TinkerCall) -> Any:
    models = call.service.bases.models
    common = {"max_context_length": call.service.context, "trainable": True, "sampleable": True}
    return {"supported_models": [{"model_name": name, **common} for name in models]}


async def create_session(call: TinkerCall) -> Any:
    session = call.service.open(call.owner, await call.read(requests.CreateSession))
    return {"session_id": session.id, "type": "create_session"}


async def heartbeat(call: TinkerCall) -> Any:
    call.service.open_session(call.owner, (await call.read(requests.SessionNamed)).session_id)
    return {"type": "session_heartbeat"}


async def finish_session(call: TinkerCall) -> Any:
    session = call.service.session(call.owner, call.path("session"))
    given = msgspec.json.decode(await call.body() or b"{}")
    reason = given.get("reason", given) if isinstance(given, dict) else {}
    session.finished = str(reason.get("type", "success"))[:50] if isinstance(reason, dict) else "success"
    await call.service.end(session)
    return Response(status_code=204)


async def telemetry(call: TinkerCall) -> Any:
    """What the client says of itself; nobody reads it."""
    await call.body()
    return {"status": "accepted"}


async def get_session(call: TinkerCall) -> Any:
    session = call.service.session(call.owner, call.path("session"))
    return {
        "training_run_ids": session.training,
        "sampler_ids": session.sampling,
        "user_metadata": {name: str(value) for name, value in session.metadata.items()} or None,
        "display_name": session.display_name,
    }


async def list_sessions(call: TinkerCall) -> Any:
    query = call.request.query_params
    limit, offset = number_in(query, "limit", 20, 1, 1000), number_in(query, "offset", 0, 0, 1 << 40)
    mine = [one.id for one in _sessions_of(call)]
    return {"sessions": mine[offset : offset + limit]}


def _sessions_of(call: TinkerCall) -> list[Session]:
    """The newest first."""
    mine = [one for one in call.service.sessions.values() if one.owner == call.owner]
    return sorted(mine, key=lambda one: -one.created_at)


async def search_sessions(call: TinkerCall) -> Any:
    asked = await call.read(requests.SearchSessions)
    wanted = [status.get("type") for status in asked.statuses or ()]
    words = (asked.display_name or "").lower().split()

    def fits(one: Session) -> bool:
        names = [one.id == asked.session_id] if asked.session_id else []
        if words:
            names.append(all(word in (one.display_name or "").lower() for word in words))
        status = "active" if one.finished is None else "client_finished"
        same = all(str(one.metadata.get(name)) == value for name, value in asked.user_metadata.items())
        return (not names or any(names)) and same and (not wanted or status in wanted)

    found = [one for one in _sessions_of(call) if fits(one)]
    if asked.cursor is not None:
        last = [one.id for one in found].index(asked.cursor.get("last_session_id", "")) if found else -1
        found = found[last + 1 :]
    page = found[: max(1, min(asked.limit, 200))]
    cursor = {"last_created_at": _moment(page[-1].created_at), "last_session_id": page[-1].id} if page else None
    return {
        "sessions": [_summary(call, one) for one in page],
        "next_cursor": cursor if len(found) > len(page) else None,
    }


def _summary(call: TinkerCall, session: Session) -> dict[str, Any]:
    finished = {"type": "client_finished", "reason": {"type": session.finished}}
    return {
        "session_id": session.id,
        "created_at": _moment(session.created_at),
        "owner": session.owner,
        "project_id": "",
        "status": {"type": "active"} if session.finished is None else finished,
        "checkpoints_count": 0,
        "display_name": session.display_name,
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ---- training --------------------------------------------------------------------------------------------------------


async def create_model(call: TinkerCall) -> Any:
    return call.service.create(call.owner, await call.read(requests.CreateModel))


async def get_info(call: TinkerCall) -> Any:
    client = call.service.client(call.owner, (await call.read(requests.ModelNamed)).model_id)
    return {
        "type": "get_info",
        "model_id": client.id,
        "model_data": {"model_name": client.base.name, "tokenizer_id": _tokenizer(client), "arch": None},
        "is_lora": True,
        "lora_rank": client.rank,
        "model_name": client.base.name,
    }


def _tokenizer(client: TrainingClient) -> str:
    """What the client loads its tokenizer from: a folder, which one on this machine finds, or a name of the hub."""
    found = resolve_model(client.base.model) if client.loaded is None else client.loaded.info.model
    return str(Path(found).resolve()) if Path(found).is_dir() else found


async def forward_backward(call: TinkerCall) -> Any:
    asked = await asyncio.to_thread(read_request, await call.body())
    return call.service.compute(call.owner, asked)


async def optim_step(call: TinkerCall) -> Any:
    return call.service.step(call.owner, await call.read(requests.OptimStep))


async def save_weights(call: TinkerCall) -> Any:
    return call.service.save(call.owner, await call.read(requests.SaveWeights))


async def save_weights_for_sampler(call: TinkerCall) -> Any:
    return call.service.save_to_sample(call.owner, await call.read(requests.SaveForSampler))


async def save_weights_external(call: TinkerCall) -> Any:
    return call.service.save_external(call.owner, await call.read(requests.SaveExternal))


async def load_weights(call: TinkerCall) -> Any:
    return call.service.load(call.owner, await call.read(requests.LoadWeights))


# ---- sampling --------------------------------------------------------------------------------------------------------


async def create_sampling_session(call: TinkerCall) -> Any:
    made = call.service.sampler(call.owner, await call.read(requests.CreateSamplingSession))
    return {"sampling_session_id": made.id, "type": "create_sampling_session"}


async def get_sampler(call: TinkerCall) -> Any:
    client = call.service.sampling_client(call.owner, call.path("sampler"))
    return {"sampler_id": client.id, "base_model": client.base, "model_path": client.path}


async def sample(call: TinkerCall) -> Any:
    return call.service.sample(call.owner, await call.read(requests.Sample))


async def retrieve_future(call: TinkerCall) -> Any:
    asked = await call.read(requests.Retrieve)
    return await call.service.promises.result(call.owner, asked.request_id)


async def cancel_future(call: TinkerCall) -> Any:
    call.service.promises.cancel(call.owner, (await call.read(requests.Retrieve)).request_id)
    return {"status": "accepted"}


# ---- what was saved --------------------------------------------------------------------------------------------------


async def list_runs(call: TinkerCall) -> Any:
    return call.service.archive.runs(call.owner, call.request.query_params)


async def get_run(call: TinkerCall) -> Any:
    return call.service.archive.run(call.owner, call.path("run"))


async def list_run_checkpoints(call: TinkerCall) -> Any:
    return call.service.archive.list(call.owner, call.request.query_params, call.path("run"))


async def list_checkpoints(call: TinkerCall) -> Any:
    return call.service.archive.list(call.owner, call.request.query_params)


async def weights_info(call: TinkerCall) -> Any:
    saved = call.service.archive.find(call.owner, (await call.read(requests.WeightsNamed)).tinker_path)
    parts = saved.run["parts"].split()
    trained = {"attn": "attention", "mlp": "mlp", "unembed": "unembedding"}
    return {
        "base_model": saved.run["base"],
        "is_lora": True,
        "lora_rank": saved.run["rank"],
        **{f"train_{name}": part in parts for name, part in trained.items()},
    }


def _own(call: TinkerCall) -> dict[str, Any]:
    return call.service.archive.own(call.owner, call.path("run"), call.path("checkpoint"))


async def delete_checkpoint(call: TinkerCall) -> Any:
    call.service.archive.delete(_own(call))
    return Response(status_code=204)


async def publish_checkpoint(call: TinkerCall) -> Any:
    call.service.archive.change(_own(call), public=1)
    return Response(status_code=204)


async def unpublish_checkpoint(call: TinkerCall) -> Any:
    call.service.archive.change(_own(call), public=0)
    return Response(status_code=204)


async def set_lifetime(call: TinkerCall) -> Any:
    row, lifetime = _own(call), (await call.read(requests.Lifetime)).ttl_seconds
    call.service.archive.check_new(row["run"], row["kind"], row["name"], lifetime)
    call.service.archive.change(row, expires_at=None if lifetime is None else time.time() + lifetime)
    return Response(status_code=204)


async def copy_weights(call: TinkerCall) -> Any:
    asked = await call.read(requests.CopyWeights)
    if asked.session_id is None or asked.model_seq_id is None:
        raise Refusal("Give session_id and model_seq_id.", param="session_id")
    call.service.open_session(call.owner, asked.session_id)
    archive, saved = call.service.archive, call.service.archive.find(call.owner, asked.source_path)
    run, kind, name = f"{asked.session_id}:train:{asked.model_seq_id}", saved.row["kind"], saved.row["name"]
    archive.check_new(run, kind, name, asked.ttl_seconds, overwrite=False)
    archive.add_run(
        call.owner, run, asked.session_id, saved.run["base"], saved.run["rank"], saved.run["parts"].split(), None
    )

    async def write(place: Path) -> None:
        await asyncio.to_thread(shutil.copytree, saved.folder, place, dirs_exist_ok=True)

    row = await archive.save(call.owner, run, kind, name, write, lifetime=asked.ttl_seconds)
    return {"tinker_path": row["id"]}


async def external_weights_urls(call: TinkerCall) -> Any:
    """URLs of the files, which open them without a key for an hour."""
    row = _own(call)
    saved = call.service.archive.find(call.owner, row["id"])
    until = int(time.time()) + _URL_SECONDS
    host = f"{call.request.url.scheme}://{call.request.headers.get('host', '')}"
    urls: dict[str, str] = {}
    for file in sorted(saved.adapter.rglob("*")):
        if file.is_file():
            inside = file.relative_to(call.service.archive.folder).as_posix()
            signed = _signature(call.secret, inside, until)
            urls[file.relative_to(saved.adapter).as_posix()] = f"{host}{PREFIX}/files/{until}-{signed}/{inside}"
    return {"urls": urls, "expires": _moment(until)}


async def fetch_file(call: TinkerCall) -> Any:
    """A file of a checkpoint, by a URL that `external_weights_urls` made."""
    until, _, signed = call.path("token").partition("-")
    inside = call.path("file")
    good = until.isdecimal() and hmac.compare_digest(signed, _signature(call.secret, inside, int(until)))
    file = call.service.archive.folder / inside
    if not good or int(until) < time.time() or not file.is_file():
        raise Refusal("There is no such file, or its URL is too old.", status=404, code="not_found")
    return FileResponse(file)


def _signature(secret: bytes, inside: str, until: int) -> str:
    return hmac.new(secret, f"{until}/{inside}".encode(), hashlib.sha256).hexdigest()


def refused(words: str) -> Handler:
    """What answers a route of the API that is not here."""

    async def refuse(call: TinkerCall) -> Any:
        raise Refusal(words, code="not_supported")

    return refuse


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    handler: Handler
    open: bool = False
    """Nobody's key is asked for."""


_NO_PROJECTS = refused("There are no projects here: a key sees its own sessions, runs and checkpoints.")
ROUTES = (
    Route("GET", "/healthz", healthz, open=True),
    Route("POST", "/client/config", client_config),
    Route("POST", "/client/dynamic_config", client_config),
    Route("GET", "/get_server_capabilities", capabilities),
    Route("POST", "/create_session", create_session),
    Route("POST", "/session_heartbeat", heartbeat),
    Route("POST", "/sessions/{session}/finish", finish_session),
    Route("POST", "/telemetry", telemetry),
    Route("GET", "/sessions", list_sessions),
    Route("POST", "/sessions/search", search_sessions),
    Route("GET", "/sessions/{session}", get_session),
    Route("PUT", "/sessions/{session}/project", _NO_PROJECTS),
    Route("GET", "/sessions/{session}/trace_export", refused("No traces of sessions are kept here.")),
    Route("POST", "/create_model", create_model),
    Route("POST", "/get_info", get_info),
    Route("POST", "/forward_backward", forward_backward),
    Route("POST", "/optim_step", optim_step),
    Route("POST", "/create_custom_loss", refused("A loss of one's own is computed by the client here.")),
    Route("POST", "/save_weights", save_weights),
    Route("POST", "/save_weights_for_sampler", save_weights_for_sampler),
    Route("POST", "/save_weights_external", save_weights_external),
    Route("POST", "/load_weights", load_weights),
    Route("POST", "/copy_weights", copy_weights),
    Route("POST", "/weights_info", weights_info),
    Route("POST", "/create_sampling_session", create_sampling_session),
    Route("GET", "/samplers/{sampler}", get_sampler),
    Route("POST", "/asample", sample),
    Route("POST", "/retrieve_future", retrieve_future),
    Route("POST", "/cancel_future", cancel_future),
    Route("GET", "/training_runs", list_runs),
    Route("GET", "/training_runs/{run}", get_run),
    Route("GET", "/training_runs/{run}/checkpoints", list_run_checkpoints),
    Route("GET", "/checkpoints", list_checkpoints),
    Route("GET", "/training_runs/{run}/checkpoints/{checkpoint:path}/external_weights_urls", external_weights_urls),
    Route("POST", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", publish_checkpoint),
    Route("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", unpublish_checkpoint),
    Route("PUT", "/training_runs/{run}/checkpoints/{checkpoint:path}/ttl", set_lifetime),
    Route("DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}", delete_checkpoint),
    Route("GET", "/files/{token}/{file:path}", fetch_file, open=True),
)


def application(service: TinkerService, keys: Keys) -> Starlette:
    """The ASGI application of all routes."""
    secret = secrets.token_bytes(32)

    def answers(route: Route) -> Any:
        async def answer(request: Request) -> Response:
            try:
                given = api_key(headers_of(request.scope))
                owner = "" if route.open else keys.owner(given, given.removeprefix(KEY_PREFIX))
                return _response(await route.handler(TinkerCall(service, request, owner, secret)))
            except Refusal as refusal:
                return _json({"detail": refusal.message}, refusal.status)
            except ClientDisconnect:
                return Response(status_code=400)
            except Exception:  # a fault of ours: the client learns that it is none of its own
                logger.exception("%s %s could not be answered", request.method, request.url.path[:200])
                return _json({"detail": "The server failed to answer. What happened is in its log."}, 500)

        return answer

    routes = [StarletteRoute(PREFIX + r.path, answers(r), methods=[r.method]) for r in ROUTES]
    return Starlette(routes=routes, exception_handlers={HTTPException: _nowhere})


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
