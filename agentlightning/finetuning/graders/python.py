"""`python`: a grader that is a program of its sender's, `grade(sample, item)`. It runs in a sandbox.

A sandbox with one interpreter grades sample after sample of one grader (`sandboxed`), so that none waits for a start;
it is made anew where it broke, and ends when nothing came for a while, or with the event loop.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import json
import os
import tempfile
import warnings
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.errors import AgentLightningError
from agentlightning.files import remove_tree
from agentlightning.finetuning.graders.base import Grader, GraderFailed, GraderFields, Grading, Score
from agentlightning.finetuning.graders.settings import GraderSettings
from agentlightning.litagent.bubblewrap import Bubblewrap
from agentlightning.litagent.isolation import check_isolation, isolated
from agentlightning.litagent.process import MARK, kill_tree
from agentlightning.types.ids import random_hex

MOST_SOURCE = 256 * 1024
IDLE_SECONDS = 10.0
"""So long a sandbox waits for another sample."""
MOST_SANDBOXES = 16
"""At the same time, of all graders of an event loop; the samples of others wait."""
_GIVING_WAY = 0.05
"""So long a sandbox waits where others wait for its place."""
_MOST_LINES = 100
START_SECONDS = 120.0
"""A start may take that long: a grader may import much."""
_GRACE_SECONDS = 10.0
"""Beyond the grader's own limit; then the sandbox itself hangs."""
_ONE_CPU = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_TEXT = Path(__file__).with_name("sandboxed.py").read_text(encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class PythonGrader(Grader):
    """What `grade(sample, item)` of the source returns."""

    type: ClassVar[str] = "python"
    source: str
    settings: GraderSettings

    @classmethod
    def read(cls, fields: GraderFields, name: str, settings: GraderSettings) -> PythonGrader:
        source, image = fields.text("source"), fields.get("image_tag")
        if len(source.encode(errors="replace")) >= MOST_SOURCE:
            raise fields.refused("source", f"has {MOST_SOURCE // 1024} KiB or more.")
        try:
            with warnings.catch_warnings(action="ignore"):
                ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise fields.refused("source", f"is no Python: {error}.") from None
        if "grade" not in source:
            raise fields.refused("source", "defines no function grade(sample, item).")
        if image is not None:
            if image not in settings.images:
                known = ", ".join(settings.images) or "none"
                raise fields.refused("image_tag", f"is {image!r}; this server has {known} (GraderSettings.images).")
            settings = replace(settings, python=settings.images[image])
        try:
            check_isolation(settings.isolation)
        except AgentLightningError as error:
            raise fields.refused("type", f"is 'python', and this server has no sandbox for it: {error}") from error
        fields.end()
        return cls(name=name, given=fields.given, source=source, settings=settings)

    async def score(self, grading: Grading) -> Score:
        found = await _Lines.line_of(self.source, self.settings).ask(
            {"sample": grading.sample.as_dict(), "item": grading.item}
        )
        if "error" in found:
            raise GraderFailed("python_grader_runtime_error", str(found["error"]))
        if not isinstance(reward := found.get("reward"), int | float):
            raise GraderFailed("python_grader_runtime_error", "The grader wrote into its own answer.")
        return Score(float(reward))


class _BrokenSandbox(Exception):
    """The sandbox is of no further use. `flag`: whose fault that is."""

    def __init__(self, flag: str, why: str) -> None:
        super().__init__(why)
        self.flag = flag


@dataclass(slots=True)
class _Job:
    request: Mapping[str, Any]
    answer: asyncio.Future[Mapping[str, Any]]


class _Line:
    """The samples that wait for one grader, and the sandboxes that work on them."""

    def __init__(self, source: str, settings: GraderSettings, slots: asyncio.Semaphore) -> None:
        self._source, self._settings, self._slots = source, settings, slots
        self._waiting = deque[_Job]()
        self._more = asyncio.Event()
        self._idle = 0
        self._workers = set[asyncio.Task[None]]()

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the grader says. Raises GraderFailed."""
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._waiting.append(job)
        self._more.set()
        if len(self._waiting) > self._idle and len(self._workers) < self._settings.processes:
            worker = asyncio.create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        return await job.answer

    async def _next(self) -> _Job | None:
        """The next sample; None where none came for a while."""
        self._idle += 1
        try:
            async with asyncio.timeout(_GIVING_WAY if self._slots.locked() else IDLE_SECONDS):
                while True:
                    while self._waiting:
                        if not (job := self._waiting.popleft()).answer.done():
                            return job
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            return None
        finally:
            self._idle -= 1

    async def _work(self) -> None:
        """Grade samples, in a new sandbox where the last one broke, until none came for a while."""
        while (job := await self._next()) is not None:
            try:
                async with self._slots, _started(self._source, self._settings) as sandbox:
                    while job is not None:
                        found = await sandbox.ask(job.request)
                        _settle(job, found)
                        job = await self._next()
                    self._workers.discard(asyncio.current_task())  # pyright: ignore[reportArgumentType]
                    return
            except _BrokenSandbox as broken:
                _settle(job, GraderFailed(broken.flag, str(broken)))
            except (OSError, AgentLightningError) as error:
                why = f"No sandbox could be made for the grader: {error}"
                _settle(job, GraderFailed("python_grader_server_error", why))
            except asyncio.CancelledError:
                for left in (job, *self._waiting):
                    if left is not None:
                        left.answer.cancel()
                raise


def _settle(job: _Job | None, found: Mapping[str, Any] | GraderFailed) -> None:
    if job is None or job.answer.done():
        return
    if isinstance(found, GraderFailed):
        job.answer.set_exception(found)
    else:
        job.answer.set_result(found)


class _Lines:
    """The graders of an event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MOST_SANDBOXES)
        self._known: list[tuple[str, GraderSettings, _Line]] = []

    @classmethod
    def line_of(cls, source: str, settings: GraderSettings) -> _Line:
        """The line of a grader in this event loop."""
        loop = asyncio.get_running_loop()
        for closed in [other for other in _of_loops if other.is_closed()]:
            _of_loops.pop(closed, None)
        lines = _of_loops.get(loop) or _of_loops.setdefault(loop, cls())
        for known, of_it, line in lines._known:
            if (known, of_it) == (source, settings):
                return line
        line = _Line(source, settings, lines._slots)
        lines._known = [*lines._known[-_MOST_LINES:], (source, settings, line)]
        return line


_of_loops: dict[asyncio.AbstractEventLoop, _Lines] = {}


class _Sandbox:
    """A process that answers one request at a time."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._seconds = process, seconds
        self._requests, self._answers = process.stdin, process.stdout

    async def start(self, source: str) -> None:
        """Raises _Broken."""
        if not (await self._exchange(json.dumps(source), START_SECONDS, "python_grader_server_error")).get("ready"):
            raise _BrokenSandbox("python_grader_server_error", "The sandbox of the grader did not start.")

    async def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises _Broken."""
        id, flag = random_hex(8), "python_grader_runtime_error"
        found = await self._exchange(json.dumps({**request, "id": id}), self._seconds + _GRACE_SECONDS, flag)
        if found.get("id") != id:
            raise _BrokenSandbox(flag, "The grader wrote into the answers of others.")
        return found

    async def _exchange(self, line: str, seconds: float, flag: str) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(seconds):
                self._requests.write(line.encode() + b"\n")
                await self._requests.drain()
                answer = await self._answers.readline()
                found = json.loads(answer) if answer.endswith(b"\n") else None
                if isinstance(found, dict):
                    return found
                assert self._process.stderr is not None
                complaint = (await self._process.stderr.read(1000)).decode(errors="replace").strip()
        except TimeoutError:
            raise _BrokenSandbox(flag, f"TimeoutError: there was no answer within {seconds:g} s") from None
        except (OSError, ValueError, RecursionError) as error:
            raise _BrokenSandbox(flag, f"The sandbox of the grader broke: {type(error).__name__}: {error}") from error
        raise _BrokenSandbox(flag, f"The sandbox of the grader ended. {complaint}".rstrip())


@asynccontextmanager
async def _started(source: str, settings: GraderSettings) -> AsyncIterator[_Sandbox]:
    """A sandbox that is ready for samples. Raises _Broken, OSError or ConfigError."""
    folder = await asyncio.to_thread(lambda: Path(tempfile.mkdtemp(prefix="agl-grader-")).resolve())
    clean = partial(remove_tree, folder)
    atexit.register(clean)  # a process may end while its event loop does not
    isolation = Bubblewrap() if settings.isolation == "bubblewrap" else settings.isolation
    folders = [str(folder)]
    if isinstance(isolation, Bubblewrap):
        isolation, folders = replace(isolation, memory_files=settings.file_bytes), [*folders, "/tmp", "/dev/shm"]
    limits = [str(n) for n in (settings.seconds, settings.memory_bytes, settings.file_bytes)]
    command = [settings.python, "-I", "-c", _TEXT, *limits, *folders]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **_ONE_CPU}
    mark = random_hex(8)
    try:
        async with isolated(isolation, command, folder, environment) as wrapped:
            process = await _spawned(wrapped.command, folder, {**wrapped.environment, MARK: mark})
            try:
                sandbox = _Sandbox(process, settings.seconds)
                await sandbox.start(source)
                yield sandbox
            finally:
                await asyncio.shield(kill_tree(process, mark))
                process._transport.close()  # pyright: ignore[reportAttributeAccessIssue]  # pipes that nobody reads
    finally:
        await asyncio.shield(asyncio.to_thread(clean))
        atexit.unregister(clean)


async def _spawned(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=folder, env=environment, start_new_session=True
    )
