"""The client: sends tasks to the server, starts the training there, and runs the agent here.

Several clients may train together: the second one that calls `train` joins the first and shares its rollouts. A client
that dies holds nothing: the server goes on with the others, or with one that comes, and stops when none does.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from urllib.parse import quote

import aiohttp

from agent_lightning.exceptions import DataUploadError, ServerConnectionError, TrainingError
from agent_lightning.runtime import air, current_config
from agentlightning.errors import ConfigError
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.metrics.console import default_console
from agentlightning.net.local_keys import find_key
from agentlightning.net.outgoing import http_session
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.tracer import DummyTracer, OtelTracer
from agentlightning.trainer.sync import run_sync
from agentlightning.types import LLM, AttemptedRollout, NamedResources
from agentlightning.types.ids import random_hex

DEFAULT_URL = "http://localhost:8000"
STATUS_SECONDS = 15.0
AgentFunction = Callable[["Resource", "Task"], Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """What an agent is given: `model_api` is a base URL that is good for this run of the agent only, key included."""

    model_api: str
    model: str
    api_key: str

    def for_agent(self, name: str) -> Resource:
        """The same for one of several agents; `train_agents` in the server's file chooses which are trained."""
        url = f"{self.model_api.rstrip('/').removesuffix('/v1')}/agent/{quote(name, safe='')}/v1"
        return replace(self, model_api=url)


class Task(SimpleNamespace):
    """A task with its fields as attributes: `task.question`, `task.ground_truth`, …; also `task["question"]`."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    @classmethod
    def of(cls, value: Any) -> Task:
        return cls(**value) if isinstance(value, dict) else cls(question=value)


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """What the training came to."""

    steps: int
    first_reward: float | None
    last_reward: float | None
    checkpoint: str | None
    """On the server."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What running tasks on the trained model came to."""

    reward: float
    """The mean; a rollout that failed counts as 0."""
    rollouts: int
    failed: int
    model: str
    """On the server."""


class FunctionOfResource(LitAgent[Any]):
    """`agent_fn(resource, task)`, sync or async, as an agent."""

    def __init__(self, function: AgentFunction) -> None:
        super().__init__()
        self._function = function

    def is_async(self) -> bool:
        return asyncio.iscoroutinefunction(self._function)

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return self._function(_resource(resources), Task.of(task))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        return await self._function(_resource(resources), Task.of(task))


def _resource(resources: NamedResources) -> Resource:
    llm = next(r for r in resources.values() if isinstance(r, LLM))
    return Resource(llm.with_key_in_url().endpoint, llm.model, llm.api_key or "")


@contextmanager
def _dummy_keys() -> Iterator[None]:
    """Keys in the environment while agents run: clients of providers refuse to be made without one, and the one that
    counts is in the URL.
    """
    set_here = [name for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY") if name not in os.environ]
    os.environ.update(dict.fromkeys(set_here, "in the URL"))
    try:
        yield
    finally:
        for name in set_here:
            os.environ.pop(name, None)


class Client:
    """A client of `python -m agent_lightning.server`.

    Args:
        url: Of the server; AGENT_LIGHTNING_SERVER_URL, else this machine, unless given.
        api_key: The server's key; AGENT_LIGHTNING_API_KEY unless given. One that a server of yours on this machine
            made for itself is found.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self.url = (url or os.environ.get("AGENT_LIGHTNING_SERVER_URL") or DEFAULT_URL).rstrip("/")
        self._key = not_empty(api_key, "api_key") or os.environ.get("AGENT_LIGHTNING_API_KEY")
        self._id = f"client-{random_hex(8)}"
        self._agent_fn: AgentFunction | None = None

    def upload_data(self, train_file: str | Path, test_file: str | Path | None = None) -> int:
        """Send tasks, one JSON value per line; those of `test_file` are validated on. Returns how many train.

        Raises DataUploadError or ServerConnectionError.
        """
        body = {"train": _read(train_file), "test": _read(test_file) if test_file else []}
        return int(run_sync(self._post("/data", body))["train"])

    def train(self, agent_fn: AgentFunction, nworkers: int = -1) -> TrainingResult:
        """Train the server's model behind `agent_fn`, which runs here, `nworkers` at a time.

        -1 is what the server's file says, else one per core. Where a training runs already, this client joins it.
        Returns when the training is over. Raises TrainingError or ServerConnectionError.
        """
        self._agent_fn = agent_fn
        status = self._work_for("/train", {}, agent_fn, nworkers)
        return TrainingResult(status["steps"], status["first_reward"], status["last_reward"], status["checkpoint"])

    def evaluate(self, test_file: str | Path, agent_fn: AgentFunction | None = None, nworkers: int = -1) -> Evaluation:
        """Run the tasks of a file on the model as it was trained; before a training, as it is.

        `agent_fn` is the one that was trained, unless given. Raises TrainingError or ServerConnectionError.
        """
        agent_fn = agent_fn or self._agent_fn
        if agent_fn is None:
            raise ConfigError("Nothing was trained by this client yet: evaluate(file, agent_fn).")
        status = self._work_for("/evaluate", {"tasks": _read(test_file)}, agent_fn, nworkers)
        return Evaluation(status["reward"], status["rollouts"], status["failed"], status["model"])

    def stop(self) -> None:
        """End what runs on the server, whoever started it; the last finished step is kept."""
        run_sync(self._post("/stop", {}))

    def checkpoint(self, path: str | Path) -> Path:
        """Fetch the trained model into the folder `path`, which must be new or empty; transformers loads it from there.

        Raises ServerConnectionError when there is none, ConfigError when the folder holds something.
        """
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"'{folder}' holds something already; give a new folder.")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder.parent) as file:
            run_sync(self._fetch("/checkpoint", file))
            with zipfile.ZipFile(file) as packed:
                packed.extractall(folder)
        return folder

    def _work_for(self, path: str, body: dict[str, Any], agent_fn: AgentFunction, nworkers: int) -> dict[str, Any]:
        """The status of what was asked for when it is done. Raises TrainingError when it did not come to its end."""
        if nworkers == 0 or nworkers < -1:
            raise ConfigError(f"nworkers is {nworkers}; give a positive number, or -1 for one per core.")
        with _dummy_keys():
            status = run_sync(self._run_rollouts(path, body, FunctionOfResource(agent_fn), nworkers))
        if status["state"] == "stopped":
            raise TrainingError(f"It was stopped before its end: {status['error']}")
        if status["state"] != "done":
            raise TrainingError(f"The training failed on the server: {status['error']}")
        return status

    async def _run_rollouts(
        self, path: str, body: dict[str, Any], agent: LitAgent[Any], nworkers: int
    ) -> dict[str, Any]:
        settings = current_config()
        given = {"timeout": settings["timeout"], "max_retries": settings["max_retries"], "client": self._id, **body}
        started = await self._post(path, given)
        workers = next(n for n in (nworkers, started["nworkers"], os.cpu_count() or 1) if n != -1)
        tracer = OtelTracer() if started["auto_instrumentation"] else DummyTracer()
        asks, air.enabled = air.enabled, air.enabled and started.get("air_enabled", True)
        address = Address(started["store"], started["key"])
        running = asyncio.create_task(
            serve_rollouts(agent, address, stop=asyncio.Event(), concurrency=workers, tracer=tracer)
        )
        waiting = asyncio.create_task(self._wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not waiting.done():
                running.result()
            return await waiting
        finally:
            running.cancel()
            waiting.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            air.enabled = asks
            with suppress(ServerConnectionError):
                await self._post("/leave", {"client": self._id}, seconds=5.0)

    async def _wait(self) -> dict[str, Any]:
        """The status when it is over; each question waits on the server, and says there that this client lives."""
        reported = 0
        while True:
            status = await self._post("/status", {"client": self._id, "wait": STATUS_SECONDS})
            if status["state"] != "running":
                return status
            if (step := status.get("step") or 0) > reported:
                reported, reward = step, status.get("reward")
                earned = "" if reward is None else f": reward {reward:.3f}"
                default_console().note(f"Step {step} of {status.get('steps')}{earned}")

    async def _post(self, path: str, body: dict[str, Any], seconds: float = 330.0) -> dict[str, Any]:
        async with self._answer(path, body, seconds) as response:
            return json.loads(await response.text())

    async def _fetch(self, path: str, file: IO[bytes]) -> None:
        async with self._answer(path, {}, None) as response:
            async for part in response.content.iter_chunked(2**20):
                file.write(part)

    @asynccontextmanager
    async def _answer(
        self, path: str, body: dict[str, Any], seconds: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        key = self._key or find_key(self.url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=seconds, sock_read=330.0)
        try:
            async with (
                http_session(headers=headers, timeout=timeout) as session,
                session.post(self.url + path, json=body) as response,
            ):
                if response.status != 200:
                    failure = DataUploadError if path == "/data" else ServerConnectionError
                    detail = _detail(await response.text())
                    raise failure(f"The server at {self.url} answered {response.status}: {detail}")
                yield response
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerConnectionError(
                f"The server at {self.url} cannot be reached: {error}. Start it with: python -m agent_lightning.server"
            ) from error


def _detail(text: str) -> str:
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _read(path: str | Path) -> list[Any]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataUploadError(f"The tasks in '{path}' cannot be read: {error.strerror}.") from error
    tasks: list[Any] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                tasks.append(json.loads(line))
            except ValueError as error:
                raise DataUploadError(f"'{path}', line {number} is not JSON: {error}.") from error
    return tasks


__all__: list[str] = ["Client", "Evaluation", "Resource", "Task", "TrainingResult"]
