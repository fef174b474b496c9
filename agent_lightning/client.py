"""The client: sends tasks to the server, starts the training there, and runs the agent here."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp

from agent_lightning.exceptions import DataUploadError, ServerConnectionError, TrainingError
from agent_lightning.runtime import current_config
from agentlightning.errors import ConfigError
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.runner.remote import Address, serve_rollouts
from agentlightning.trainer.sync import run_sync
from agentlightning.types import LLM, AttemptedRollout, NamedResources

DEFAULT_URL = "http://localhost:8000"
AgentFunction = Callable[["Resource", "Task"], Any]


@dataclass(frozen=True, slots=True)
class Resource:
    """What an agent is given: `model_api` is a base URL that is good for this run of the agent only, key included."""

    model_api: str
    model: str
    api_key: str


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


class Client:
    """A client of `python -m agent_lightning.server`.

    Args:
        url: Of the server; AGENT_LIGHTNING_SERVER_URL, else this machine, unless given.
        api_key: The server's key; AGENT_LIGHTNING_API_KEY unless given.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None) -> None:
        self.url = (url or os.environ.get("AGENT_LIGHTNING_SERVER_URL") or DEFAULT_URL).rstrip("/")
        self._key = not_empty(api_key, "api_key") or os.environ.get("AGENT_LIGHTNING_API_KEY")

    def upload_data(self, train_file: str | Path, test_file: str | Path | None = None) -> int:
        """Send tasks, one JSON value per line; those of `test_file` are validated on. Returns how many train.

        Raises DataUploadError or ServerConnectionError.
        """
        body = {"train": _read(train_file), "test": _read(test_file) if test_file else []}
        return int(run_sync(self._post("/data", body))["train"])

    def train(self, agent_fn: AgentFunction, nworkers: int = -1) -> TrainingResult:
        """Train the server's model behind `agent_fn`, which runs here, `nworkers` at a time (-1: one per core).

        Returns when the training is over. Raises TrainingError or ServerConnectionError.
        """
        if nworkers == 0 or nworkers < -1:
            raise ConfigError(f"nworkers is {nworkers}; give a positive number, or -1 for one per core.")
        # Clients of providers refuse to be made without a key; the one that counts is in the URL.
        for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
            os.environ.setdefault(name, "in the URL")
        workers = (os.cpu_count() or 1) if nworkers == -1 else nworkers
        return run_sync(self._train(FunctionOfResource(agent_fn), workers))

    async def _train(self, agent: LitAgent[Any], workers: int) -> TrainingResult:
        settings = current_config()
        given = {"timeout": settings["timeout"], "max_retries": settings["max_retries"]}
        started = await self._post("/train", given)
        stop = asyncio.Event()
        address = Address(started["store"], started["key"])
        running = asyncio.create_task(serve_rollouts(agent, address, stop=stop, concurrency=workers))
        waiting = asyncio.create_task(self._wait())
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if running.done() and not waiting.done():
                running.result()
            status = await waiting
        finally:
            stop.set()
            running.cancel()
            waiting.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
        if status["state"] != "done":
            raise TrainingError(f"The training failed on the server: {status['error']}")
        return TrainingResult(status["steps"], status["first_reward"], status["last_reward"], status["checkpoint"])

    async def _wait(self) -> dict[str, Any]:
        """The status of the training when it is over; each question waits on the server."""
        while True:
            status = await self._post("/status", {"wait": 20.0})
            if status["state"] != "running":
                return status

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=300.0)) as session,
                session.post(self.url + path, json=body) as response,
            ):
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerConnectionError(
                f"The server at {self.url} cannot be reached: {error}. Start it with: python -m agent_lightning.server"
            ) from error
        if response.status != 200:
            failure = DataUploadError if path == "/data" else ServerConnectionError
            raise failure(f"The server at {self.url} answered {response.status}: {_detail(text)}")
        return json.loads(text)


def _detail(text: str) -> str:
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return text[:300]


def _read(path: str | Path) -> list[Any]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
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


__all__: list[str] = ["Client", "Resource", "Task", "TrainingResult"]
