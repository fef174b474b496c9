"""The routes of the API, a row each: method, path below /v1, and what answers it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from agentlightning.finetuning import files
from agentlightning.finetuning.files import Blobs, Files, Form, check_purpose, lifetime_of
from agentlightning.finetuning.graders import HttpModels, run_grader, validate_grader
from agentlightning.finetuning.jobs import Jobs, Quotas
from agentlightning.finetuning.keys import ADMIN, Keys
from agentlightning.finetuning.models import Catalog, Pool
from agentlightning.finetuning.queue import FineTuningQueue
from agentlightning.finetuning.records import JobEvent, Records
from agentlightning.finetuning.wire import MOST_BODY, bad, listed, missing, new_id, page, read_body
from agentlightning.gateway.exchange import Refusal

_UPLOAD_SECONDS = 3600
_MOST_PENDING = 10_000
"""Uploads of a key that are under way, and parts of one."""
_NAME = 255
"""Characters of a file's name."""


class Services(Protocol):
    """What the routes of a server work on."""

    records: Records
    quotas: Quotas
    blobs: Blobs
    files: Files
    catalog: Catalog
    jobs: Jobs
    keys: Keys
    queue: FineTuningQueue
    pool: Pool

    def models(self, owner: str) -> HttpModels:
        """The models that a key's graders may use."""
        ...


@dataclass(frozen=True)
class ApiCall:
    """A request, and whose it is."""

    server: Services
    request: Request
    owner: str

    @property
    def id(self) -> str:
        """What the path names."""
        return self.request.path_params["id"]

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query_params

    async def body(self) -> bytes:
        return await read_body(self.request, MOST_BODY)

    async def json(self) -> dict[str, Any]:
        """A body of JSON; an empty one says nothing."""
        body = await self.body()
        try:
            found = msgspec.json.decode(body or b"{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise bad(f"The body is no JSON: {error}.", None, "invalid_json") from None
        if not isinstance(found, dict):
            raise bad("The body is no JSON object.", None, "invalid_json")
        return found


Handler = Callable[[ApiCall], Awaitable[Any]]


# ---- files -----------------------------------------------------------------------------------------------------------


def _check_stored(call: ApiCall, more: int) -> None:
    quotas = call.server.quotas
    if call.server.files.stored_bytes(call.owner) + more > quotas.stored_bytes:
        raise Refusal(
            f"The files of this key would have more than {quotas.stored_bytes} bytes (stored_bytes). Delete some.",
            status=429,
            kind="rate_limit_error",
            code="storage_exceeded",
        )


async def create_file(call: ApiCall) -> Any:
    server = call.server
    _check_stored(call, 0)
    server.records.check_more("files", call.owner)
    with server.blobs.writing(call.owner, lambda: _check_stored(call, 0)) as incoming:
        form = Form(call.request.headers.get("content-type", ""), incoming, server.quotas.file_bytes)
        await form.read(call.request.stream())
        _check_form(form, "file")
        check_purpose(form.fields.get("purpose"))
        lifetime = lifetime_of(form.fields)
        await asyncio.to_thread(incoming.sync)
        name, purpose = form.filename or "file", form.fields["purpose"]
        content = incoming.keep()
        with server.files.naming(content):
            return files.seen(server.files.add(call.owner, content, name, purpose, lifetime))


def _check_form(form: Form, field: str) -> None:
    if form.files != {field}:
        raise bad(f"The form is to hold one file, as '{field}'.", field, "missing_required_parameter")
    if unknown := form.fields.keys() - {"purpose", "expires_after[anchor]", "expires_after[seconds]"}:
        raise bad(f"The form has '{min(unknown)}', which has no effect here.", min(unknown), "unknown_parameter")


async def list_files(call: ApiCall) -> Any:
    order, where, values = call.query.get("order", "desc"), "owner = ?", [call.owner]
    if order not in ("asc", "desc"):
        raise bad("order is asc or desc.", "order")
    if (purpose := call.query.get("purpose")) is not None:
        where, values = f"{where} AND purpose = ?", [*values, purpose]
    records = call.server.records
    ascending = order == "asc"
    return page(records, "files", where, values, call.query, files.seen, default=10_000, ascending=ascending)


async def get_file(call: ApiCall) -> Any:
    return files.seen(call.server.files.get(call.owner, call.id))


async def delete_file(call: ApiCall) -> Any:
    call.server.files.delete(call.server.files.get(call.owner, call.id))
    return {"id": call.id, "object": "file", "deleted": True}


async def file_content(call: ApiCall) -> Any:
    row = call.server.files.get(call.owner, call.id)
    return FileResponse(call.server.files.path(row), media_type="application/octet-stream")


def _check_count(call: ApiCall, table: str, where: str, key: str) -> None:
    found = call.server.records.row(f"SELECT count(*) AS n FROM {table} WHERE {where}", key)
    if found is not None and found["n"] >= _MOST_PENDING:
        words = f"There are {_MOST_PENDING:,} {table} already. End or cancel some."
        raise Refusal(words, status=429, kind="rate_limit_error", code=f"too_many_{table}")


# ---- files in parts --------------------------------------------------------------------------------------------------


def _upload(call: ApiCall) -> dict[str, Any]:
    """The upload that a request names, while it may go on. Raises `Refusal`."""
    row = call.server.records.row("SELECT * FROM uploads WHERE id = ? AND owner = ?", call.id, call.owner)
    if row is None:
        raise missing("upload", call.id)
    if row["status"] != "pending" or row["expires_at"] < time.time():
        raise bad(f"The upload is {row['status']} or has expired.", "upload_id", "invalid_state")
    return row


def _seen_upload(row: Mapping[str, Any], file: Any = None) -> dict[str, Any]:
    body = msgspec.json.decode(row["body"])
    shown = {name: row[name] for name in ("id", "created_at", "expires_at", "status")}
    of_file = {name: body[name] for name in ("bytes", "filename", "purpose")}
    return {**shown, **of_file, "object": "upload", "file": file}


async def create_upload(call: ApiCall) -> Any:
    body = await call.json()
    check_purpose(body.get("purpose"))
    size, name = body.get("bytes"), body.get("filename")
    if not isinstance(size, int) or not 0 < size <= call.server.quotas.file_bytes:
        raise bad(f"bytes is a number from 1 to {call.server.quotas.file_bytes}.", "bytes")
    if not isinstance(name, str):
        raise bad("filename is a text.", "filename")
    lifetime = lifetime_of(body)
    _check_stored(call, size)
    _check_count(call, "uploads", "owner = ? AND status = 'pending'", call.owner)
    call.server.records.check_more("uploads", call.owner)
    now, key = int(time.time()), new_id("upload_")
    after = {} if lifetime is None else {"expires_after": body["expires_after"]}
    kept = msgspec.json.encode({"bytes": size, "filename": name[:_NAME], "purpose": body["purpose"], **after}).decode()
    rows, expires = call.server.records, now + _UPLOAD_SECONDS
    rows.add("uploads", id=key, owner=call.owner, body=kept, status="pending", created_at=now, expires_at=expires)
    return _seen_upload(rows.row("SELECT * FROM uploads WHERE id = ?", key) or {})


async def add_part(call: ApiCall) -> Any:
    server, upload = call.server, _upload(call)
    declared = msgspec.json.decode(upload["body"])["bytes"]
    _check_count(call, "parts", "upload = ?", call.id)
    sent = server.records.row("SELECT coalesce(sum(bytes), 0) AS n FROM parts WHERE upload = ?", call.id) or {"n": 0}
    with server.blobs.writing(call.owner, lambda: _check_stored(call, 0)) as incoming:
        form = Form(call.request.headers.get("content-type", ""), incoming, declared - sent["n"])
        await form.read(call.request.stream())
        _check_form(form, "data")
        await asyncio.to_thread(incoming.sync)
        content, now, key = incoming.keep(), int(time.time()), new_id("part_")
        row = {"id": key, "upload": call.id, "sha256": content.sha256, "bytes": content.size, "created_at": now}
        with server.files.naming(content):
            server.records.add("parts", **row)
    return {"id": key, "created_at": now, "upload_id": call.id, "object": "upload.part"}


async def complete_upload(call: ApiCall) -> Any:
    server, upload, order = call.server, _upload(call), await call.json()
    body = msgspec.json.decode(upload["body"])
    parts = {row["id"]: row for row in server.records.rows("SELECT * FROM parts WHERE upload = ?", call.id)}
    wanted = order.get("part_ids")
    if not isinstance(wanted, list) or not all(isinstance(key, str) and key in parts for key in wanted):
        raise bad("part_ids is a list of the parts of this upload.", "part_ids")
    if sum(parts[key]["bytes"] for key in wanted) != body["bytes"]:
        raise bad(f"The parts are to have {body['bytes']} bytes together.", "part_ids")
    server.records.check_more("files", call.owner)
    sent = sum(part["bytes"] for part in parts.values())  # which are gone afterwards
    _check_stored(call, body["bytes"] - sent)
    try:
        content = await server.blobs.joined([parts[key]["sha256"] for key in wanted], order.get("md5"))
    except FileNotFoundError:
        _upload(call)  # another request has ended it meanwhile
        raise
    with server.files.naming(content), server.records.transaction():
        _upload(call)  # nothing else has ended it meanwhile,
        _check_stored(call, body["bytes"] - sent)  # or taken the room
        file = server.files.add(call.owner, content, body["filename"], body["purpose"], lifetime_of(body))
        left = server.files.end_upload(call.id, status="completed", file=file["id"])
    server.files.release(*left)
    return _seen_upload({**upload, "status": "completed"}, files.seen(file))


async def cancel_upload(call: ApiCall) -> Any:
    upload = _upload(call)
    call.server.files.release(*call.server.files.end_upload(call.id, status="cancelled"))
    return _seen_upload({**upload, "status": "cancelled"})


# ---- jobs ------------------------------------------------------------------------------------------------------------


async def create_job(call: ApiCall) -> Any:
    row = call.server.jobs.create(call.owner, await call.body())
    call.server.queue.validate(row["id"])
    return call.server.jobs.seen(row)


async def list_jobs(call: ApiCall) -> Any:
    return call.server.jobs.list(call.owner, call.query)


async def get_job(call: ApiCall) -> Any:
    return call.server.jobs.seen(call.server.jobs.get(call.owner, call.id))


async def cancel_job(call: ApiCall) -> Any:
    event = JobEvent(name="cancelled", message="The job was cancelled")
    row = call.server.jobs.change(call.owner, call.id, "cancelled", event, finished_at=int(time.time()))
    call.server.queue.kill(call.id)
    return call.server.jobs.seen(row)


async def pause_job(call: ApiCall) -> Any:
    event = JobEvent(name="paused", message="The job is paused: it stops after the step under way, with a checkpoint")
    row = call.server.jobs.change(call.owner, call.id, "paused", event)
    call.server.queue.pause(call.id)
    return call.server.jobs.seen(row)


async def resume_job(call: ApiCall) -> Any:
    jobs = call.server.jobs
    if (status := jobs.get(call.owner, call.id)["status"]) != "paused":
        raise bad(f"The job is {status}, so it cannot be resumed.", "fine_tuning_job_id", "invalid_state")
    row = jobs.change(call.owner, call.id, "queued", JobEvent(name="resumed", message="The job was resumed"))
    call.server.queue.wake()
    return jobs.seen(row)


async def list_events(call: ApiCall) -> Any:
    return call.server.jobs.events(call.owner, call.id, call.query)


async def list_checkpoints(call: ApiCall) -> Any:
    return call.server.jobs.checkpoints(call.owner, call.id, call.query)


async def run_a_grader(call: ApiCall) -> Any:
    models = call.server.models(call.owner)
    try:
        return await run_grader(await call.json(), models)
    finally:
        await models.close()


async def validate_a_grader(call: ApiCall) -> Any:
    found = validate_grader(await call.json())
    call.server.jobs.check_grader(call.owner, found["grader"], "grader")
    return found


# ---- models and keys -------------------------------------------------------------------------------------------------


async def list_models(call: ApiCall) -> Any:
    return listed(call.server.catalog.list(call.owner))


async def get_model(call: ApiCall) -> Any:
    return call.server.catalog.seen(call.server.catalog.find(call.owner, call.id).name)


async def delete_model(call: ApiCall) -> Any:
    call.server.catalog.delete(call.owner, call.id)
    name = call.id
    await call.server.pool.forget(lambda one: one == name or one.startswith(f"{name}:ckpt-step-"))
    return {"id": name, "object": "model", "deleted": True}


def _only_admin(call: ApiCall) -> None:
    if call.owner != ADMIN:
        raise Refusal("Only the admin key may do this.", status=403, kind="permission_error", code="forbidden")


async def create_key(call: ApiCall) -> Any:
    _only_admin(call)
    name = (await call.json()).get("name")
    if not isinstance(name, str) or not name:
        raise bad("A key has a name.", "name", "missing_required_parameter")
    return call.server.keys.create(name)


async def list_keys(call: ApiCall) -> Any:
    _only_admin(call)
    return listed(call.server.keys.list())


async def delete_key(call: ApiCall) -> Any:
    _only_admin(call)
    call.server.keys.delete(call.id)
    return {"id": call.id, "object": "organization.admin_api_key.deleted", "deleted": True}


@dataclass(frozen=True)
class Route:
    """What answers a method on a path."""

    method: str
    path: str
    handler: Handler
    says: str
    """For the table of routes in the documentation."""


ROUTES: tuple[Route, ...] = (
    Route("POST", "/files", create_file, "upload a file, with the purpose `fine-tune`"),
    Route("GET", "/files", list_files, "list the key's files"),
    Route("GET", "/files/{id}", get_file, "get a file"),
    Route("DELETE", "/files/{id}", delete_file, "delete a file, unless a job needs it"),
    Route("GET", "/files/{id}/content", file_content, "get a file's bytes"),
    Route("POST", "/uploads", create_upload, "begin an upload in parts"),
    Route("POST", "/uploads/{id}/parts", add_part, "add a part"),
    Route("POST", "/uploads/{id}/complete", complete_upload, "make the file from the parts"),
    Route("POST", "/uploads/{id}/cancel", cancel_upload, "cancel the upload and delete its parts"),
    Route("POST", "/fine_tuning/jobs", create_job, "create a job"),
    Route("GET", "/fine_tuning/jobs", list_jobs, "list the key's jobs, optionally by `metadata`"),
    Route("GET", "/fine_tuning/jobs/{id}", get_job, "get a job"),
    Route("POST", "/fine_tuning/jobs/{id}/cancel", cancel_job, "cancel a job"),
    Route("POST", "/fine_tuning/jobs/{id}/pause", pause_job, "pause a running job, with a checkpoint"),
    Route("POST", "/fine_tuning/jobs/{id}/resume", resume_job, "resume a paused job from its checkpoint"),
    Route("GET", "/fine_tuning/jobs/{id}/events", list_events, "list a job's events, newest first"),
    Route("GET", "/fine_tuning/jobs/{id}/checkpoints", list_checkpoints, "list a job's checkpoints, newest first"),
    Route("POST", "/fine_tuning/alpha/graders/run", run_a_grader, "run a grader on a sample"),
    Route("POST", "/fine_tuning/alpha/graders/validate", validate_a_grader, "check whether a grader can be used"),
    Route("GET", "/models", list_models, "list the base models and the key's own"),
    Route("GET", "/models/{id:path}", get_model, "get a model"),
    Route("DELETE", "/models/{id:path}", delete_model, "delete a fine-tuned model and its checkpoints"),
    Route("POST", "/organization/admin_api_keys", create_key, "make a key (admin key only)"),
    Route("GET", "/organization/admin_api_keys", list_keys, "list the keys (admin key only)"),
    Route("DELETE", "/organization/admin_api_keys/{id}", delete_key, "delete a key (admin key only)"),
)


def as_response(found: Any) -> Response:
    if isinstance(found, Response):
        return found
    return Response(msgspec.json.encode(found), media_type="application/json")
