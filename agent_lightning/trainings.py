"""What the server does for its clients: one training or evaluation at a time, which clients join, leave and survive.

The store of a run is the server's own: it stays up until every client has heard of the run's end. A run that no client
has been heard of for `client_seconds` is stopped, so that a client that died never holds the server.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent_lightning.settings import Settings, make_algorithm
from agentlightning.algorithm import Baseline
from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.checkpoint import latest_checkpoint, model_path
from agentlightning.errors import AgentLightningError, ConfigError, ConflictError
from agentlightning.keys import derived_secret, new_key
from agentlightning.metrics import read_metrics
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.trainer import RunResult, Trainer
from agentlightning.trainer.strategy import Strategy
from agentlightning.types import RolloutConfig, RolloutMode

CLIENT_SECONDS = 60.0
FAREWELL_SECONDS = 10.0
"""How long the store of a run that ended waits for clients that have not left."""
STOP_SECONDS = 300.0
"""How long `stop` waits for the step that runs."""
CLOSE_SECONDS = 5.0
"""How long a run has to end when the server ends."""


@dataclass(eq=False)
class Run:
    """One training or evaluation, its store, and the clients that work for it."""

    trainer: Trainer
    server: LightningStoreServer
    key: str
    request: Any
    """What the client that started it asked for; one that joins asks for the same."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[RunResult] | None = None
    why_stopped: str | None = None
    clients: dict[str, float] = field(default_factory=dict)
    """When each was heard of last."""
    heard: float = field(default_factory=time.monotonic)

    def hear(self, client: str) -> None:
        self.heard = self.clients[client] = time.monotonic()

    @property
    def over(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def algorithm(self) -> Algorithm:
        return self.trainer.algorithm


@dataclass
class Trainings:
    """The tasks, and the run that goes on or was the last."""

    settings: Settings
    host: str
    runs: Path = Path("runs")
    client_seconds: float = CLIENT_SECONDS
    train: list[Any] = field(default_factory=list)
    test: list[Any] = field(default_factory=list)
    run: Run | None = None
    trained: Path | None = None
    """The last checkpoint of the last training that left one."""
    _tending: set[asyncio.Task[None]] = field(default_factory=set)
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    def upload(self, train: list[Any], test: list[Any]) -> None:
        """Raises ConflictError while other tasks are trained on."""
        if self._going_on is not None and (train, test) != (self.train, self.test):
            raise ConflictError(
                "A training on other tasks runs. Wait for its end, end it with Client.stop(), or join it with "
                "Client.train() alone."
            )
        self.train, self.test = train, test

    async def join_training(self, client: str, timeout: float | None, max_retries: int) -> dict[str, Any]:
        """Start a training, or join the one that runs; returns where its store is, and the key to it."""
        if not self.train:
            raise ConfigError("There are no tasks yet: Client.upload_data('train.jsonl') comes first.")
        config = _rollout_config(timeout, max_retries)
        request = ("training", config)
        if (run := self._joined(client, request)) is None:
            algorithm = make_algorithm(self.settings, config)
            run = await self._start(algorithm, request, self.train, self.test or None)
        return self._address(run, client)

    async def join_evaluation(
        self, client: str, tasks: list[Any], timeout: float | None, max_retries: int
    ) -> dict[str, Any]:
        """Start running the tasks on the model as it was trained, or join who does."""
        if not tasks:
            raise ConfigError("There are no tasks to evaluate on.")
        config = _rollout_config(timeout, max_retries)
        request = ("evaluation", config, tasks)
        if (run := self._joined(client, request)) is None:
            model = self.settings.name if self.trained is None else str(model_path(self.trained))
            algorithm = Baseline(
                model=model,
                device=self.settings.options.get("device", "auto"),
                mode=RolloutMode.TEST,
                max_context=self.settings.max_context,
                rollout_config=config,
            )
            run = await self._start(algorithm, request, tasks, None)
        return self._address(run, client)

    async def status(self, client: str | None, wait: float) -> dict[str, Any]:
        """How the run is, when it is over or after `wait` seconds; asking is how a client shows that it lives."""
        run = self.run
        if run is None or run.task is None:
            return {"state": "none"}
        if client is not None:
            run.hear(client)
        closing = asyncio.create_task(self._closing.wait())
        try:
            wait = min(wait, self.client_seconds / 3)  # who waits for an answer is not heard of meanwhile
            await asyncio.wait({run.task, closing}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if client is not None:
            run.hear(client)
        if not run.task.done():
            return (
                {"state": "stopped", "error": "The server was stopped."} if self._closing.is_set() else _progress(run)
            )
        return _outcome(run)

    def leave(self, client: str) -> None:
        """A client needs the store no longer."""
        if self.run is not None:
            self.run.clients.pop(client, None)

    async def stop(self) -> dict[str, Any]:
        """End what runs, with its last finished step kept; returns its status."""
        run = self._going_on
        if run is not None:
            run.why_stopped = "Client.stop() ended it."
            run.stop.set()
            if run.task is not None:
                await asyncio.wait({run.task}, timeout=STOP_SECONDS)
        return await self.status(None, 0.0)

    async def close(self) -> None:
        """End everything, soon: what is not done by then ends with this process."""
        self._closing.set()
        run = self._going_on
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.wait({run.task}, timeout=CLOSE_SECONDS)
        for task in self._tending:
            task.cancel()
        await asyncio.gather(*self._tending, return_exceptions=True)

    def checkpoint(self) -> Path:
        """The folder of the trained model. Raises ConfigError if there is none."""
        if self.trained is None:
            raise ConfigError("No training has left a checkpoint on this server yet: Client.train(…) comes first.")
        return self.trained

    @property
    def _going_on(self) -> Run | None:
        return self.run if self.run is not None and not self.run.over else None

    def _joined(self, client: str, request: Any) -> Run | None:
        """The run that goes on, if it is what the client asks for. Raises ConflictError if it is something else."""
        run = self._going_on
        if run is not None and run.request != request:
            raise ConflictError(
                f"A {run.request[0]} runs already, with other settings or tasks. Wait for its end, or end it with "
                "Client.stop()."
            )
        return run

    def _address(self, run: Run, client: str) -> dict[str, Any]:
        run.hear(client)
        runtime = {"nworkers": self.settings.nworkers, "auto_instrumentation": self.settings.auto_instrumentation}
        runtime["air_enabled"] = self.settings.air_enabled
        return {"store": run.server.endpoint, "key": run.key, **runtime}

    async def _start(self, algorithm: Algorithm, request: Any, train: Sequence[Any], test: Sequence[Any] | None) -> Run:
        key = new_key()
        folder = _new_folder(self.runs / f"{type(algorithm).__name__.lower()}-{time.strftime('%Y%m%d-%H%M%S')}")
        folder.mkdir(parents=True)
        store = SqliteLightningStore(folder / "store.db")
        server = LightningStoreServer(store, self.host, 0, admin_key=key, secret=derived_secret(key))
        strategy = Strategy("algorithm", "remote", self.host, 0, key, managed_store=False)
        trainer = Trainer(algorithm=algorithm, strategy=strategy, store=store, run_dir=folder)
        try:
            await server.start()
        except AgentLightningError:
            await store.close()
            raise
        run = self.run = Run(trainer, server, key, request)
        run.task = asyncio.create_task(trainer.fit_async(None, train, test, stop=run.stop))
        tending = asyncio.create_task(self._tend(run, store))
        self._tending.add(tending)
        tending.add_done_callback(self._tending.discard)
        return run

    async def _tend(self, run: Run, store: SqliteLightningStore) -> None:
        """Stop a run that its clients left, and close its store when they know that it is over."""
        assert run.task is not None
        try:
            while not run.over:
                await asyncio.wait({run.task}, timeout=min(1.0, self.client_seconds / 4))
                if time.monotonic() - run.heard > self.client_seconds and not run.stop.is_set():
                    run.why_stopped = f"No client was heard of for {self.client_seconds:g} s."
                    run.stop.set()
            if not run.task.cancelled():
                run.task.exception()  # asked for, so that nothing warns of it; a status tells it
            with suppress(ConfigError):
                self.trained = latest_checkpoint(run.trainer.run_dir)
            end = time.monotonic() + FAREWELL_SECONDS
            while run.clients and time.monotonic() < end:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            await run.server.stop()
            await store.close()


def _progress(run: Run) -> dict[str, Any]:
    """How far a training has come: its last step, of how many, and what it earned."""
    try:
        rows = read_metrics(run.trainer.run_dir / "metrics.jsonl")
    except (OSError, ValueError):  # there is none yet, or a line is being written
        rows = []
    last = next((row for row in reversed(rows) if row.get("step")), {})
    return {"state": "running", **{name: last.get(name) for name in ("step", "steps", "reward")}}


def _rollout_config(timeout: float | None, max_retries: int) -> RolloutConfig:
    retry: list[Any] = ["failed", "timeout"] if max_retries else []
    return RolloutConfig(timeout_seconds=timeout, max_attempts=1 + max_retries, retry_condition=retry)


def _outcome(run: Run) -> dict[str, Any]:
    assert run.task is not None
    if run.task.cancelled():
        return {"state": "stopped", "error": run.why_stopped or "The server was stopped."}
    error = run.task.exception()
    if error is not None:
        return {"state": "failed", "error": str(error)}
    result = run.task.result()
    state = {"state": "stopped", "error": run.why_stopped} if run.why_stopped else {"state": "done"}
    return {**state, **(_measured(run) if isinstance(run.algorithm, Baseline) else _learned(result))}


def _learned(result: RunResult) -> dict[str, Any]:
    rows = read_metrics(result.run_dir / "metrics.jsonl")
    rewards = [row["reward"] for row in rows if row.get("reward") is not None]
    return {
        "steps": rows[-1]["step"] if rows else 0,
        "first_reward": rewards[0] if rewards else None,
        "last_reward": rewards[-1] if rewards else None,
        "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
    }


def _measured(run: Run) -> dict[str, Any]:
    assert isinstance(run.algorithm, Baseline)
    episodes = run.algorithm.episodes
    rewards = [episode.reward or 0.0 for episode in episodes]
    return {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "rollouts": len(episodes),
        "failed": sum(not episode.good for episode in episodes),
        "model": run.algorithm.model,
    }


def _new_folder(path: Path) -> Path:
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())
