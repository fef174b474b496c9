"""The routes of the API, a row each: method, path below /api/v1, and what answers it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from agentlightning.errors import ModelError
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.tinker import bodies
from agentlightning.finetuning.tinker.archive import number_in
from agentlightning.finetuning.tinker.data import read_request
from agentlightning.finetuning.tinker.service import TinkerService, TinkerSession, TrainingClient
from agentlightning.finetuning.wire import MOST_BODY, read_body
from agentlightning.gateway.exchange import Refusal
from agentlightning.models import resolve_model
from agentlightning.models.shape import read_shape
from agentlightning.reading import whole_number

PREFIX = "/api/v1"
KEY_PREFIX = "tml-"
"""The client takes only keys that begin so; one of this server is given to it with this in front."""
_MOST_DATA = 64 << 20
"""Of a body with data to learn from."""
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

    async def body(self, most: int = MOST_BODY) -> bytes:
        found = self.request.state.body = await read_body(self.request, most)
        return found

    async def read(self, kind: type[bodies.Body]) -> bodies.Body:
        most = MOST_BODY if kind is bodies.SamplesRequest else bodies.MOST_BYTES
        return bodies.read(await self.body(most), kind)


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
    most, common = call.service.context, {"trainable": True, "sampleable": True}
    longest = {name: await asyncio.to_thread(_longest, base, most) for name, base in call.service.bases.models.items()}
    models = [{"model_name": name, "max_context_length": tokens, **common} for name, tokens in longest.items()]
    return {"supported_models": models}


def _longest(base: BaseModel, most: int) -> int:
    """The tokens that a base model takes here: `most`, unless it was made for fewer."""
    try:
        shape = read_shape(base.model)
    except ModelError:  # it is not here yet
        return most
    return most if shape is None or shape.max_context is None else min(most, shape.max_context)


async def create_session(call: TinkerCall) -> Any:
    session = call.service.open(call.owner, await call.read(bodies.CreateSession))
    return {"session_id": session.id, "type": "create_session"}


async def heartbeat(call: TinkerCall) -> Any:
    call.service.open_session(call.owner, (await call.read(bodies.SessionNamed)).session_id)
    return {"type": "session_heartbeat"}


async def finish_session(call: TinkerCall) -> Any:
    """One of which nothing is known any more is finished already."""
    session = call.service.sessions.get(call.path("session"))
    if session is None or session.owner != call.owner or session.finished is not None:
        return Response(status_code=204)
    given = (await call.read(bodies.FinishSession)).reason or {}
    session.finished = str(given.get("type", "success"))[:50]
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


def _sessions_of(call: TinkerCall) -> list[TinkerSession]:
    """The newest first."""
    mine = [one for one in call.service.sessions.values() if one.owner == call.owner]
    return sorted(mine, key=lambda one: -one.created_at)


async def search_sessions(call: TinkerCall) -> Any:
    body = await call.read(bodies.SearchSessions)
    if body.owner not in (None, {"type": "own"}):
        raise Refusal("owner is to be the key's own; a key sees no other's sessions.", param="owner")
    wanted = [status.get("type") for status in body.statuses or ()]
    words = (body.display_name or "").lower().split()

    def fits(one: TinkerSession) -> bool:
        names = [one.id == body.session_id] if body.session_id else []
        if words:
            names.append(all(word in (one.display_name or "").lower() for word in words))
        status = "active" if one.finished is None else "client_finished"
        same = all(str(one.metadata.get(name)) == value for name, value in body.user_metadata.items())
        return (not names or any(names)) and same and (not wanted or status in wanted)

    found = [one for one in _sessions_of(call) if fits(one)]
    if body.cursor is not None:
        last = body.cursor.get("last_session_id")
        found = found[next((i + 1 for i, one in enumerate(found) if one.id == last), len(found)) :]
    page = found[: max(1, min(body.limit, 200))]
    cursor = {"last_created_at": _moment(page[-1].created_at), "last_session_id": page[-1].id} if page else None
    return {
        "sessions": [_summary(call, one) for one in page],
        "next_cursor": cursor if len(found) > len(page) else None,
    }


def _summary(call: TinkerCall, session: TinkerSession) -> dict[str, Any]:
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
    return call.service.create(call.owner, await call.read(bodies.CreateModel))


async def get_info(call: TinkerCall) -> Any:
    client = call.service.client(call.owner, (await call.read(bodies.ModelNamed)).model_id)
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
    body = await call.body(_MOST_DATA)
    request = await asyncio.to_thread(read_request, body, call.service.stable_reinforce)
    return call.service.compute(call.owner, request)


async def optim_step(call: TinkerCall) -> Any:
    return call.service.step(call.owner, await call.read(bodies.StepRequest))


async def save_weights(call: TinkerCall) -> Any:
    return call.service.save(call.owner, await call.read(bodies.SaveWeights))


async def save_weights_for_sampler(call: TinkerCall) -> Any:
    return call.service.save_to_sample(call.owner, await call.read(bodies.SaveForSampler))


async def save_weights_external(call: TinkerCall) -> Any:
    return call.service.save_external(call.owner, await call.read(bodies.SaveExternal))


async def load_weights(call: TinkerCall) -> Any:
    return call.service.load(call.owner, await call.read(bodies.LoadWeights))


# ---- sampling --------------------------------------------------------------------------------------------------------


async def create_sampling_session(call: TinkerCall) -> Any:
    made = call.service.sampler(call.owner, await call.read(bodies.CreateSamplingSession))
    return {"sampling_session_id": made.id, "type": "create_sampling_session"}


async def get_sampler(call: TinkerCall) -> Any:
    client = call.service.sampling_client(call.owner, call.path("sampler"))
    return {"sampler_id": client.id, "base_model": client.base, "model_path": client.path}


async def sample(call: TinkerCall) -> Any:
    return call.service.sample(call.owner, await call.read(bodies.SamplesRequest))


async def retrieve_future(call: TinkerCall) -> Any:
    body = await call.read(bodies.Retrieve)
    return await call.service.promises.result(call.owner, body.request_id)


async def cancel_future(call: TinkerCall) -> Any:
    call.service.promises.cancel(call.owner, (await call.read(bodies.Retrieve)).request_id)
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
    saved = call.service.archive.find(call.owner, (await call.read(bodies.WeightsNamed)).tinker_path)
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
    row, lifetime = _own(call), (await call.read(bodies.Lifetime)).ttl_seconds
    call.service.archive.check_new(row["run"], row["kind"], row["name"], lifetime)
    call.service.archive.change(row, expires_at=None if lifetime is None else time.time() + lifetime)
    return Response(status_code=204)


async def copy_weights(call: TinkerCall) -> Any:
    body = await call.read(bodies.CopyWeights)
    if body.session_id is None or body.model_seq_id is None:
        raise Refusal("Give session_id and model_seq_id.", param="session_id")
    call.service.open_session(call.owner, body.session_id)
    archive, saved = call.service.archive, call.service.archive.find(call.owner, body.source_path)
    run, kind, name = f"{body.session_id}:train:{body.model_seq_id}", saved.row["kind"], saved.row["name"]
    archive.check_new(run, kind, name, body.ttl_seconds, overwrite=False)
    archive.check_run(call.owner, run)
    archive.add_run(
        call.owner, run, body.session_id, saved.run["base"], saved.run["rank"], saved.run["parts"].split(), None
    )

    async def write(place: Path) -> None:
        await asyncio.to_thread(shutil.copytree, saved.folder, place, dirs_exist_ok=True)

    row = await archive.save(call.owner, run, kind, name, write, lifetime=body.ttl_seconds)
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
    expiry, _, signed = call.path("token").partition("-")
    inside, until = call.path("file"), whole_number(expiry) or 0
    good = hmac.compare_digest(signed.encode(), _signature(call.secret, inside, until).encode())
    file = call.service.archive.folder / inside
    if not good or until < time.time() or not file.is_file():
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
class TinkerRoute:
    method: str
    path: str
    says: str
    """For people."""
    handler: Handler
    open: bool = False
    """Nobody's key is asked for."""


_NO_PROJECTS = refused("There are no projects here: a key sees its own sessions, runs and checkpoints.")
ROUTES = (
    TinkerRoute("GET", "/healthz", "check that the server is up, without a key", healthz, open=True),
    TinkerRoute("POST", "/client/config", "get the client's settings", client_config),
    TinkerRoute("POST", "/client/dynamic_config", "the same, during a session", client_config),
    TinkerRoute("GET", "/get_server_capabilities", "list the base models", capabilities),
    TinkerRoute("POST", "/create_session", "open a session", create_session),
    TinkerRoute("POST", "/session_heartbeat", "keep a session open; it ends after 30 minutes without one", heartbeat),
    TinkerRoute("POST", "/sessions/{session}/finish", "end a session and free its adapters", finish_session),
    TinkerRoute("POST", "/telemetry", "accepted, and not kept", telemetry),
    TinkerRoute("GET", "/sessions", "list the key's open sessions, newest first", list_sessions),
    TinkerRoute("POST", "/sessions/search", "search them", search_sessions),
    TinkerRoute("GET", "/sessions/{session}", "get a session", get_session),
    TinkerRoute("PUT", "/sessions/{session}/project", "refused: there are no projects", _NO_PROJECTS),
    TinkerRoute(
        "GET",
        "/sessions/{session}/trace_export",
        "refused: no traces are kept",
        refused("No traces of sessions are kept here."),
    ),
    TinkerRoute("POST", "/create_model", "create a training client", create_model),
    TinkerRoute("POST", "/get_info", "get a training client's model", get_info),
    TinkerRoute("POST", "/forward_backward", "compute a loss, with or without its gradients", forward_backward),
    TinkerRoute("POST", "/optim_step", "take an optimiser step", optim_step),
    TinkerRoute(
        "POST",
        "/create_custom_loss",
        "refused: the client computes custom losses itself",
        refused("A loss of one's own is computed by the client here."),
    ),
    TinkerRoute("POST", "/save_weights", "save weights and the optimiser's state", save_weights),
    TinkerRoute("POST", "/save_weights_for_sampler", "save weights to sample from", save_weights_for_sampler),
    TinkerRoute("POST", "/save_weights_external", "save a PEFT adapter for download", save_weights_external),
    TinkerRoute("POST", "/load_weights", "continue from a checkpoint", load_weights),
    TinkerRoute("POST", "/copy_weights", "copy a checkpoint, also one that another key published", copy_weights),
    TinkerRoute("POST", "/weights_info", "get a checkpoint's base model and adapter", weights_info),
    TinkerRoute("POST", "/create_sampling_session", "create a sampling client", create_sampling_session),
    TinkerRoute("GET", "/samplers/{sampler}", "get a sampling client", get_sampler),
    TinkerRoute("POST", "/asample", "sample", sample),
    TinkerRoute("POST", "/retrieve_future", "wait for a result", retrieve_future),
    TinkerRoute("POST", "/cancel_future", "cancel a request", cancel_future),
    TinkerRoute("GET", "/training_runs", "list the key's training runs", list_runs),
    TinkerRoute("GET", "/training_runs/{run}", "get a training run", get_run),
    TinkerRoute("GET", "/training_runs/{run}/checkpoints", "list a run's checkpoints", list_run_checkpoints),
    TinkerRoute("GET", "/checkpoints", "list the key's checkpoints", list_checkpoints),
    TinkerRoute(
        "GET",
        "/training_runs/{run}/checkpoints/{checkpoint:path}/external_weights_urls",
        "get a URL for each file, valid for an hour without a key",
        external_weights_urls,
    ),
    TinkerRoute(
        "POST",
        "/training_runs/{run}/checkpoints/{checkpoint:path}/publish",
        "let other keys read a checkpoint",
        publish_checkpoint,
    ),
    TinkerRoute(
        "DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}/publish", "undo that", unpublish_checkpoint
    ),
    TinkerRoute(
        "PUT", "/training_runs/{run}/checkpoints/{checkpoint:path}/ttl", "set when a checkpoint expires", set_lifetime
    ),
    TinkerRoute(
        "DELETE", "/training_runs/{run}/checkpoints/{checkpoint:path}", "delete a checkpoint", delete_checkpoint
    ),
    TinkerRoute("GET", "/files/{token}/{file:path}", "download a file by such a URL", fetch_file, open=True),
)
