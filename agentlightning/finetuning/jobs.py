"""Jobs as clients make and see them. What runs them is in `queue`."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.errors import AgentLightningError
from agentlightning.files import folder_bytes
from agentlightning.finetuning.files import Files
from agentlightning.finetuning.graders import parse_grader
from agentlightning.finetuning.graders.settings import owners_settings
from agentlightning.finetuning.lines import LineError, Lines
from agentlightning.finetuning.progress import checkpoints_of, metrics_of, written_at
from agentlightning.finetuning.recipe import BaseModel, take
from agentlightning.finetuning.records import FINISHED, JobEvent, Records, Row
from agentlightning.finetuning.requests import JobRequest, read_job
from agentlightning.finetuning.wire import LOCAL, bad, limit_of, listed, missing, new_id, page
from agentlightning.gateway.exchange import Refusal
from agentlightning.reading import whole_number

CREATED = "Created fine-tuning job: {}"
_RATE = (
    "Other jobs of this key have to end first: it has {} that are not finished, as many as a key may have (open_jobs)."
)


@dataclass(frozen=True)
class Quotas:
    """What each key may have."""

    file_bytes: int = 512 << 20
    """Of one file."""
    stored_bytes: int = 10 << 30
    """Of all its files."""
    open_jobs: int = 20
    """Jobs that are not finished."""
    checkpoint_bytes: int = 100 << 30
    """Of all checkpoints that its jobs and its training clients (tinker) keep."""
    records: int = 100_000
    """Of files, uploads, jobs, and the runs and checkpoints of training clients: of each so many rows."""


class Jobs:
    """All jobs, and what can be done with them."""

    def __init__(
        self,
        records: Records,
        files: Files,
        folder: Path,
        base_of: Callable[[str, str], BaseModel],
        quotas: Quotas,
        agents: Mapping[str, str],
    ) -> None:
        """`folder`: has a folder for each job. `base_of`: the model that a name means to a key; raises `Refusal`."""
        self.records = records
        self.files = files
        self._folder = folder
        self.base_of = base_of
        self._quotas = quotas
        self.check_checkpoints: Callable[[str], None] = lambda owner: None
        """Raises `Refusal` where a key may not have further checkpoints."""
        self.agents = agents
        """The agents that jobs may train, by name: `file.py:agent`, or a command."""

    def folder(self, job: str) -> Path:
        return self._folder / job

    # ---- what clients do -------------------------------------------------------------------------------------------

    def create(self, owner: str, body: bytes) -> Row:
        """A new job, whose files are to be validated. Raises `Refusal`."""
        request = read_job(body)
        self.base_of(owner, request.model)
        self._check_grader(owner, request)
        for name in ("training_file", "validation_file"):
            if (given := getattr(request, name)) is not None:
                self._check_file(owner, given, name)
        marks = ", ".join("?" * len(FINISHED))
        count = f"SELECT count(*) AS n FROM jobs WHERE owner = ? AND status NOT IN ({marks})"
        open_jobs = (self.records.row(count, owner, *FINISHED) or {"n": 0})["n"]
        if open_jobs >= self._quotas.open_jobs:
            raise Refusal(_RATE.format(open_jobs), status=429, kind="rate_limit_error", code="too_many_jobs")
        self.records.check_more("jobs", owner)
        self.check_checkpoints(owner)
        seed = secrets.randbelow(2**31) if request.seed is None else request.seed
        job = new_id("ftjob-")
        with self.records.transaction():
            self.records.add(
                "jobs",
                id=job,
                owner=owner,
                request=msgspec.json.encode(msgspec.structs.replace(request, seed=seed)).decode(),
                status="validating_files",
                created_at=int(time.time()),
            )
            first = JobEvent(name="created", message=CREATED.format(job))
            validating = f"Validating training file: {request.training_file}"
            if request.validation_file:
                validating += f" and validation file: {request.validation_file}"
            self.records.say(job, [first, JobEvent(name="validating", message=validating)])
        return self.get(owner, job)

    def checkpoint_bytes(self, owner: str) -> int:
        """What the checkpoints of a key's jobs take."""
        jobs = self.records.rows("SELECT id FROM jobs WHERE owner = ?", owner)
        return sum(folder_bytes(self.folder(job["id"]) / "checkpoints") for job in jobs)

    def _check_grader(self, owner: str, request: JobRequest) -> None:
        """Raises `Refusal` or GraderRefused for a grader that cannot be used, or asks a model that there is not, and
        for an agent that nobody registered."""
        if (own := request.chosen.reinforcement) is None:
            return
        if own.agent is not None and own.agent not in self.agents:
            known = ", ".join(self.agents) or "none"
            raise bad(f"There is no agent '{own.agent}' here. There are: {known}.", "method.reinforcement.agent")
        if own.grader is not None:
            self.check_grader(owner, own.grader, "method.reinforcement.grader")

    def check_grader(self, owner: str, grader: Mapping[str, Any], where: str) -> None:
        """Raises `Refusal` or GraderRefused for one that cannot be used, or asks a model that there is not."""
        for model in parse_grader(grader, where).models:
            if model in owners_settings().providers:
                continue
            try:
                self.base_of(owner, model)
            except Refusal as refusal:
                raise bad(refusal.message, f"{where}.model", "model_not_found") from None

    def _check_file(self, owner: str, key: str, param: str) -> None:
        try:
            found = self.files.get(owner, key)
        except Refusal as refusal:
            upload = (
                "" if key.startswith("file-") else " Upload it (POST /v1/files), and give the id that this answers."
            )
            raise bad(refusal.message + upload, param, "invalid_file") from None
        if found["purpose"] != "fine-tune":
            raise bad(f"The file {key} is for {found['purpose']}, not for fine-tune.", param, "invalid_file")

    def get(self, owner: str, job: str) -> Row:
        """Raises `Refusal` for one that is not there, or not for this key."""
        found = self.records.row("SELECT * FROM jobs WHERE id = ? AND owner = ?", job, owner)
        if found is None:
            raise missing("fine-tuning job", job)
        return found

    def change(self, owner: str, job: str, to: str, event: JobEvent, **values: Any) -> Row:
        """Bring a job into another state. Raises `Refusal` where it cannot follow the one that it is in."""
        row = self.get(owner, job)
        if not self.records.move(job, to, event, **values):
            words = f"{to} already" if row["status"] == to else f"{row['status']}, so it cannot become {to}"
            raise bad(f"The job is {words}.", "fine_tuning_job_id", "invalid_state")
        return self.get(owner, job)

    # ---- validation ------------------------------------------------------------------------------------------------

    async def validate(self, job: str) -> None:
        """Read the files of a job, and queue it; or it has failed."""
        row = self.records.row("SELECT * FROM jobs WHERE id = ?", job)
        if row is None or row["status"] != "validating_files":
            return
        request = request_of(row)
        try:
            base = self.base_of(row["owner"], request.model)
            paths = self.paths(row)
            lines = await asyncio.to_thread(_check, paths, request.chosen.lines)
            taken = await asyncio.to_thread(take, request.chosen, lines, base)
        except _FileError as error:
            self.fail(job, error.message, "invalid_training_file", error.param)
        except AgentLightningError as error:
            self.fail(job, str(error), "invalid_job", getattr(error, "param", None))
        else:
            ready = JobEvent(name="queued", message="Files validated, moving job to queued state")
            self.records.move(job, "queued", ready, taken=msgspec.json.encode(taken).decode())

    def paths(self, row: Row) -> dict[str, Path]:
        """Where the files of a job are."""
        request = request_of(row)
        named = {"training_file": request.training_file, "validation_file": request.validation_file}
        found = {name: self.records.row("SELECT * FROM files WHERE id = ?", key) for name, key in named.items() if key}
        return {name: self.files.path(file) for name, file in found.items() if file}

    def fail(self, job: str, message: str, code: str, param: str | None = None) -> None:
        error = msgspec.json.encode({"code": code, "message": message, "param": param}).decode()
        event = JobEvent(name="failed", message=message, level="error", data={"code": code, "param": param})
        self.records.move(job, "failed", event, error=error, finished_at=int(time.time()))

    # ---- what clients see ------------------------------------------------------------------------------------------

    def seen(self, row: Row) -> dict[str, Any]:
        """A job as clients see it."""
        request, done = request_of(row), row["status"] == "succeeded"
        method = msgspec.to_builtins(request.chosen)
        taken = msgspec.json.decode(row["taken"])
        method = {name: value for name, value in method.items() if value is not None}
        chosen = msgspec.to_builtins(request.chosen.hyperparameters)
        shown = {"n_epochs": "auto", "batch_size": "auto", "learning_rate_multiplier": "auto"} | chosen | taken
        method[request.chosen.type] = {**(method.get(request.chosen.type) or {}), "hyperparameters": shown}
        return {
            "id": row["id"],
            "object": "fine_tuning.job",
            "created_at": row["created_at"],
            "finished_at": row["finished_at"],
            "model": request.model,
            "fine_tuned_model": name_of(row) if done and not row["model_deleted"] else None,
            "organization_id": LOCAL,
            "status": row["status"],
            "hyperparameters": {n: v for n, v in shown.items() if n in _OLDER},
            "method": method,
            "training_file": request.training_file,
            "validation_file": request.validation_file,
            "result_files": [row["result_file"]] if row["result_file"] else [],
            "trained_tokens": row["trained_tokens"],
            "seed": request.seed,
            "error": msgspec.json.decode(row["error"]) if row["error"] else None,
            "estimated_finish": None if row["status"] in FINISHED else row["estimated_finish"],
            "integrations": msgspec.to_builtins(request.integrations or []),
            "metadata": request.metadata,
        }

    def list(self, owner: str, query: Mapping[str, str]) -> dict[str, Any]:
        where, values = "owner = ?", [owner]
        for name, value in query.items():
            if name == "metadata" and value == "null":
                where += " AND coalesce(json_extract(request, '$.metadata'), '{}') = '{}'"
            elif name.startswith("metadata[") and name.endswith("]"):
                where += " AND EXISTS (SELECT 1 FROM json_each(request, '$.metadata') WHERE key = ? AND value = ?)"
                values += [name[len("metadata[") : -1], value]
            elif name not in ("after", "limit"):
                raise bad(f"Jobs cannot be listed by '{name[:100]}'.", name[:100], "unknown_parameter")
        return page(self.records, "jobs", where, values, query, self.seen)

    def events(self, owner: str, job: str, query: Mapping[str, str]) -> dict[str, Any]:
        self.get(owner, job)
        return page(self.records, "events", "job = ?", [job], query, _seen_event)

    def checkpoints(self, owner: str, job: str, query: Mapping[str, str]) -> dict[str, Any]:
        """The checkpoints that are kept, the newest first."""
        row = self.get(owner, job)
        folder = self.folder(job)
        rows = {m["step"]: m for m in metrics_of(folder, request_of(row).chosen.type)}
        kept = {} if row["model_deleted"] else checkpoints_of(folder)
        found = [
            {
                "id": f"ftckpt_{hashlib.sha256(f'{job}/{step}'.encode()).hexdigest()[:24]}",
                "object": "fine_tuning.job.checkpoint",
                "created_at": at,
                "fine_tuned_model_checkpoint": name_of(row, step),
                "fine_tuning_job_id": job,
                "step_number": step,
                "metrics": {k: v for k, v in rows.get(step, {}).items() if k not in ("time", "seconds_left")},
            }
            for step, at in sorted(written_at(kept).items(), reverse=True)
        ]
        return _behind(found, query)

    # ---- models ----------------------------------------------------------------------------------------------------

    def of_model(self, owner: str, name: str) -> tuple[Row, int | None] | None:
        """The job whose model a name means to a key, and the step if it means a checkpoint; None: it means none."""
        parts = name.split(":")
        step = parts.pop().removeprefix("ckpt-step-") if ":ckpt-step-" in name else None
        number = None if step is None else whole_number(step)
        if len(parts) < 5 or parts[0] != "ft" or len(parts[-1]) != _KEY_LENGTH or (step is not None and number is None):
            return None
        like = f"ftjob-{parts[-1]}%"
        for row in self.records.rows("SELECT * FROM jobs WHERE owner = ? AND id LIKE ?", owner, like):
            if name_of(row, number) == name and not row["model_deleted"]:
                return row, number
        return None


_KEY_LENGTH = 8
"""Of a job's id, in the names of its models."""
_OLDER = ("n_epochs", "batch_size", "learning_rate_multiplier")


class _FileError(Exception):
    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.message, self.param = message, param


def _check(paths: Mapping[str, Path], kind: str) -> int:
    """Read all lines; how many the training file has."""
    sizes: dict[str, int] = {}
    for param, path in paths.items():
        try:
            lines = Lines(path, kind)
            lines.check()
        except LineError as error:
            raise _FileError(str(error), param) from None
        sizes[param] = len(lines)
    return sizes["training_file"]


def request_of(row: Row) -> JobRequest:
    return msgspec.json.decode(row["request"], type=JobRequest)


def name_of(row: Row, step: int | None = None) -> str:
    """The name of the model that a job makes, or of one of its checkpoints."""
    request = request_of(row)
    base = request.model.split(":")[1] if request.model.startswith("ft:") else request.model
    name = f"ft:{base}:local:{request.suffix or ''}:{row['id'].removeprefix('ftjob-')[:_KEY_LENGTH]}"
    return name if step is None else f"{name}:ckpt-step-{step}"


def _seen_event(row: Row) -> dict[str, Any]:
    shown = {name: row[name] for name in ("id", "created_at", "level", "message", "type")}
    return {**shown, "object": "fine_tuning.job.event", "data": msgspec.json.decode(row["data"])}


def _behind(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A page of items that are in no table."""
    limit, after = limit_of(query, 10), query.get("after")
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise bad(f"'{after[:200]}' is none of these, so nothing comes after it.", "after")
    start = 0 if after is None else ids.index(after) + 1
    return listed(items[start : start + limit], len(items) > start + limit)
