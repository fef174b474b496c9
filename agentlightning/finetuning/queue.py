"""The queue: one job at a time, in a process of its own, the keys in turn.

A job's process writes into its folder, and the queue reads there; a pipe says when there is something to read. Whatever
dies, the folder says how far the job is: after a restart a running job goes on from its last checkpoint first.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.files import atomic_write, make_folder, open_private
from agentlightning.finetuning.files import RESULTS, Blobs
from agentlightning.finetuning.jobs import Jobs, name_of, request_of
from agentlightning.finetuning.progress import checkpoint_events, events_of, metrics_of, table_of
from agentlightning.finetuning.records import TRANSITIONS, JobEvent, Row
from agentlightning.finetuning.training import JOB_FILE, LOCK_FILE, OUTCOME_FILE, JobFile, OutcomeFile
from agentlightning.gateway.exchange import Refusal
from agentlightning.importing import import_environment

ModelsOfJob = contextlib.AbstractContextManager[Mapping[str, str]]
"""Variables of a job's environment that say where its graders ask models, good within the block."""
logger = logging.getLogger(__name__)

TRAINING = (sys.executable, "-P", "-m", "agentlightning.finetuning.training")
"""The command that trains the job in the folder that it is given."""
LOG_FILE = "process.log"
STOP_SECONDS = 120.0
"""How long a process may take to stop after the step under way."""
_LAST_WORDS = 2000
_SWEEP_SECONDS = 60.0


class FineTuningQueue:
    """Runs jobs from `run` on until it is stopped."""

    def __init__(
        self, jobs: Jobs, blobs: Blobs, models_of: Callable[[Row], ModelsOfJob], command: Sequence[str] = TRAINING
    ) -> None:
        """`models_of`: what a job's graders ask, by its row."""
        self._models_of = models_of
        self._jobs, self._records, self._blobs = jobs, jobs.records, blobs
        self._command = command
        self._wake = asyncio.Event()
        self._process: tuple[str, asyncio.subprocess.Process] | None = None
        """The job whose process runs, and the process."""
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun_at: dict[str, int] = {}
        """By job, the step that it had reached when its last process began."""

    # ---- what clients do -------------------------------------------------------------------------------------------

    def validate(self, job: str) -> None:
        """Validate a new job's files, beside everything else."""
        task = asyncio.create_task(self._validate(job), name=f"validate-{job}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _validate(self, job: str) -> None:
        try:
            await self._jobs.validate(job)
        except Exception as error:  # a job must not wait for ever for a validation that died
            logger.exception("The files of %s could not be validated", job)
            self._jobs.fail(job, f"The files could not be validated: {error}", "server_error")
        self._wake.set()

    def wake(self) -> None:
        """There may be something to do."""
        self._wake.set()

    @property
    def busy_with(self) -> str | None:
        """The job whose process runs."""
        return None if self._process is None else self._process[0]

    def pause(self, job: str) -> None:
        """Let a job that runs stop after the step under way."""
        if self._process is not None and self._process[0] == job and (pipe := self._process[1].stdin) is not None:
            pipe.close()

    def kill(self, job: str) -> None:
        """End a job's process at once."""
        if self._process is not None and self._process[0] == job:
            _kill(self._process[1].pid)

    # ---- the queue -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until it is cancelled, or `stop` was called."""
        for row in self._records.rows("SELECT id FROM jobs WHERE status = 'validating_files' ORDER BY seq"):
            self.validate(row["id"])
        while not self._stopping:
            self._wake.clear()
            row = self._next()
            if row is not None:
                await self._work_safely(row)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _SWEEP_SECONDS)
            self._jobs.files.expire()

    async def stop(self) -> None:
        """Let the job that runs write a checkpoint; it goes on when the server is started again."""
        self._stopping = True
        self._wake.set()
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            job, process = self._process
            self.pause(job)
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                _kill(process.pid)

    def _next(self) -> Row | None:
        """A job that was running before; else the oldest of the key whose last job began the longest ago."""
        running = self._records.row("SELECT * FROM jobs WHERE status = 'running' ORDER BY seq LIMIT 1")
        return running or self._records.row(
            "SELECT * FROM jobs WHERE status = 'queued' ORDER BY "
            "(SELECT max(started_at) FROM jobs AS other WHERE other.owner = jobs.owner), seq LIMIT 1"
        )

    async def _work_safely(self, row: Row) -> None:
        try:
            await self._work(row)
        except Exception as error:  # a full disk, a process that cannot be started: other jobs may do better
            logger.exception("The job %s could not be brought forward", row["id"])
            self._jobs.fail(row["id"], f"The server could not train it: {error}", "server_error")

    async def _work(self, row: Row) -> None:
        """Bring a job forward until its process ends."""
        job = row["id"]
        folder = self._jobs.folder(job)
        make_folder(folder)
        await self._alone(folder)
        if row["status"] == "running" and self._settle(job):  # it ended while no server was there
            return
        try:
            self._write_job(row, folder)
        except Refusal as refusal:
            self._jobs.fail(job, refusal.message, "invalid_job", refusal.param)
            return
        if row["status"] == "queued":
            event = JobEvent(
                name="running", message="Fine-tuning job started" if row["step"] < 0 else "Fine-tuning job goes on"
            )
            if not self._records.move(job, "running", event, started_at=time.time()):
                return
            self._records.say(job, [_taken(row)])
        self._begun_at[job] = self._step(job)
        with self._models_of(row) as models:
            await self._train(job, folder, models)
        if not self._settle(job) and not self._stopping:
            self._after_death(job, folder)

    async def _train(self, job: str, folder: Path, environment: Mapping[str, str]) -> None:
        with open_private(folder / LOG_FILE, "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                str(folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env={**import_environment(), **environment},
            )
        self._process = job, process
        try:
            if self._status(job) != "running" or self._stopping:  # it was paused or cancelled meanwhile
                self.pause(job)
            assert process.stdout is not None
            while await process.stdout.read(4096):
                self.collect(job)
            await process.wait()
            self.collect(job)
        except asyncio.CancelledError:
            _kill(process.pid)
            raise
        finally:
            self._process = None

    async def _alone(self, folder: Path) -> None:
        """Wait until the process of an earlier server, which stops by itself, is gone."""
        file = folder / LOCK_FILE
        deadline = time.monotonic() + STOP_SECONDS
        while file.exists() and (holder := _holder(file)) is not None:
            if time.monotonic() > deadline:
                _kill(holder)
            await asyncio.sleep(0.1)

    def _write_job(self, row: Row, folder: Path) -> None:
        """Say what is to be trained. Raises `Refusal` where the model that it starts from is not there any more."""
        request, paths = request_of(row), self._jobs.paths(row)
        base = self._jobs.base_of(row["owner"], request.model)
        own = request.chosen.reinforcement
        job = JobFile(
            id=row["id"],
            method=request.chosen,
            taken=msgspec.json.decode(row["taken"]),
            base=base.model,
            settings=base.settings,
            seed=request.seed or 0,
            training_file=str(paths["training_file"]),
            validation_file=str(paths["validation_file"]) if "validation_file" in paths else None,
            integrations=request.integrations or [],
            agent=self._jobs.agents[own.agent] if own and own.agent else None,
        )
        (folder / OUTCOME_FILE).unlink(missing_ok=True)
        atomic_write(folder / JOB_FILE, msgspec.json.encode(job).decode())

    # ---- what came of it -------------------------------------------------------------------------------------------

    def collect(self, job: str) -> None:
        """Say what is new in the folder."""
        row = self._records.row("SELECT * FROM jobs WHERE id = ?", job)
        assert row is not None
        folder = self._jobs.folder(job)
        fresh = metrics_of(folder, request_of(row).chosen.type, after=row["step"])
        with self._records.transaction():
            self._records.say(job, [*events_of(fresh), *checkpoint_events(folder)])
            if fresh:
                left = fresh[-1].get("seconds_left")
                ends = None if left is None else int(time.time() + left)
                self._records.change("jobs", job, step=fresh[-1]["step"], estimated_finish=ends)

    def _settle(self, job: str) -> bool:
        """Whether the job's process left an outcome, or the job is not running any more: then its state says so."""
        outcome = _outcome(self._jobs.folder(job))
        if outcome is not None and outcome.status == "succeeded":
            self.collect(job)
            self._succeed(job)
        elif outcome is not None and outcome.status == "failed":
            self._jobs.fail(job, outcome.message or "", outcome.code or "training_failed", outcome.param)
        return self._status(job) != "running"

    def _succeed(self, job: str) -> None:
        row = self._records.row("SELECT * FROM jobs WHERE id = ?", job)
        assert row is not None
        kind = request_of(row).chosen.type
        rows = metrics_of(self._jobs.folder(job), kind)
        if row["status"] not in TRANSITIONS["succeeded"]:
            return
        content = self._blobs.write(table_of(rows, kind))
        with self._jobs.files.naming(content), self._records.transaction():
            file = self._jobs.files.add(row["owner"], content, "step_metrics.csv", RESULTS)
            self._records.say(job, [JobEvent(name="model", message=f"New fine-tuned model created: {name_of(row)}")])
            self._records.move(
                job,
                "succeeded",
                JobEvent(name="succeeded", message="The job has successfully completed"),
                finished_at=int(time.time()),
                trained_tokens=int(sum(one.get("trained_tokens") or 0 for one in rows)),
                result_file=file["id"],
            )

    def _after_death(self, job: str, folder: Path) -> None:
        """A process that left no outcome, although it was not to end, is started again if it had got on."""
        if _outcome(folder) is not None:
            return
        log = (folder / LOG_FILE).read_bytes()[-_LAST_WORDS:].decode(errors="replace").strip()
        logger.warning("The process of %s died: %s", job, log)
        if self._step(job) > self._begun_at[job]:
            died = JobEvent(
                name=f"died/{self._step(job)}", level="warn", message="The training process died; it is started again."
            )
            self._records.say(job, [died])
            return
        words = log.splitlines()[-1] if log else "it left no word"
        self._jobs.fail(job, f"The training process died: {words}", "training_process_died")

    def _status(self, job: str) -> str:
        return (self._records.row("SELECT status FROM jobs WHERE id = ?", job) or {})["status"]

    def _step(self, job: str) -> int:
        return (self._records.row("SELECT step FROM jobs WHERE id = ?", job) or {})["step"]


def _taken(row: Row) -> JobEvent:
    """The values that are taken for what a client left out."""
    taken: Mapping[str, Any] = msgspec.json.decode(row["taken"])
    shown = ", ".join(f"{name}={value}" for name, value in taken.items())
    return JobEvent(
        name="hyperparameters", message=f"Hyperparameters taken: {shown}, seed={request_of(row).seed}", data=taken
    )


def _outcome(folder: Path) -> OutcomeFile | None:
    try:
        return msgspec.json.decode((folder / OUTCOME_FILE).read_bytes(), type=OutcomeFile)
    except (OSError, msgspec.MsgspecError):
        return None


def _holder(file: Path) -> int | None:
    """The id of the process that holds a lock; None: nobody does."""
    with file.open() as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return int(opened.read() or 0)
    return None


def _kill(pid: int) -> None:
    """The process and those that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid > 1:
            os.killpg(pid, signal.SIGKILL)
