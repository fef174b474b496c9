"""`python -m agent_lightning.server`: takes tasks from a client, and trains while the client runs the agent.

POST /data     {"train": [task, …], "test": [task, …]}
POST /train    starts a training; answers where its store is
POST /status   {"wait": seconds}; answers when the training is over, or after that time
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import TypeAdapter, ValidationError

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.family import PPO, ReinforcePP
from agentlightning.errors import AgentLightningError, ConfigError
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.metrics import read_metrics
from agentlightning.serving import LoopServer
from agentlightning.trainer import RunResult, Trainer
from agentlightning.trainer.strategy import Strategy
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutConfig

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class Settings:
    """The configuration file: sections model, training, runtime."""

    name: str = "calc"
    algorithm: str = "grpo"
    learning_rate: float = 1e-5
    batch_size: int = 16
    """Tasks per step."""
    group_size: int = 8
    kl_coef: float = 0.0
    epochs: int = 1
    steps: int | None = None
    max_context: int = 4096
    nworkers: int = -1
    """Is the client's to decide; kept for files that have it."""
    auto_instrumentation: bool = True
    air_enabled: bool = True


SECTIONS: Mapping[str, Sequence[str]] = {
    "model": ("name",),
    "training": (
        *("algorithm", "learning_rate", "batch_size", "group_size", "kl_coef", "epochs", "steps", "max_context"),
    ),
    "runtime": ("nworkers", "auto_instrumentation", "air_enabled"),
}
ALGORITHMS: Mapping[str, type[GRPO]] = {"grpo": GRPO, "ppo": PPO, "reinforce++": ReinforcePP}
ENVIRONMENT = {
    "LIGHTNING_MODEL_PATH": "name",
    "LIGHTNING_RL_ALGORITHM": "algorithm",
    "LIGHTNING_LEARNING_RATE": "learning_rate",
    "LIGHTNING_BATCH_SIZE": "batch_size",
}


def read_settings(path: Path | None, environment: Mapping[str, str] = os.environ) -> Settings:
    """From the file, then the environment. Raises ConfigError for keys that mean nothing."""
    given: dict[str, Any] = {}
    if path is not None:
        given = _flat(_load(path), path)
    for variable, name in ENVIRONMENT.items():
        if variable in environment:
            given[name] = environment[variable]
    try:
        return TypeAdapter(Settings).validate_python(given)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"The setting '{wrong['loc'][0]}' is wrong: {wrong['msg']}.") from error


def _load(path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("A configuration file needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"The configuration '{path}' cannot be read: {error}") from error


def _flat(sections: Any, path: Path) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for section, values in sections.items():
        known = SECTIONS.get(section)
        if known is None:
            raise ConfigError(f"{path}: there is no section '{section}'; there are {', '.join(SECTIONS)}.")
        unknown = sorted(set(values or {}) - set(known))
        if unknown:
            raise ConfigError(f"{path}: '{unknown[0]}' is no setting of '{section}'; it has {', '.join(known)}.")
        given |= values or {}
    return given


def make_algorithm(settings: Settings, rollout_config: RolloutConfig) -> GRPO:
    """The algorithm that the settings name. Raises ConfigError for one there is not."""
    kind = ALGORITHMS.get(settings.algorithm.lower())
    if kind is None:
        raise ConfigError(f"There is no algorithm '{settings.algorithm}'; there are {', '.join(ALGORITHMS)}.")
    options: dict[str, Any] = {"kl_coef": settings.kl_coef} if settings.kl_coef else {}
    if kind is not PPO and settings.air_enabled:
        options["credit"] = "return_to_go"  # so that a tool's reward goes to the call that made the tool call
    return kind(
        model=settings.name,
        learning_rate=settings.learning_rate,
        tasks_per_step=settings.batch_size,
        group_size=settings.group_size,
        epochs=settings.epochs,
        steps=settings.steps,
        max_context=settings.max_context,
        rollout_config=rollout_config,
        **options,
    )


@dataclass
class Trainings:
    """The tasks, and the training that runs or ran last."""

    settings: Settings
    host: str
    runs: Path | None = None
    train: list[Any] = field(default_factory=list)
    test: list[Any] = field(default_factory=list)
    task: asyncio.Task[RunResult] | None = None

    async def start(self, timeout: float | None, max_retries: int) -> dict[str, str]:
        """Start a training; returns where its store is, and the key to it."""
        retry: list[Any] = ["failed", "timeout"] if max_retries else []
        config = RolloutConfig(timeout_seconds=timeout, max_attempts=1 + max_retries, retry_condition=retry)
        strategy = Strategy("algorithm", "remote", self.host, 0, secrets.token_hex(32))
        trainer = Trainer(algorithm=make_algorithm(self.settings, config), strategy=strategy, run_dir=self._run_dir())
        trainer.address = asyncio.get_running_loop().create_future()
        self.task = asyncio.create_task(trainer.fit_async(LitAgent(), self.train, self.test or None))
        await asyncio.wait({self.task, trainer.address}, return_when=asyncio.FIRST_COMPLETED)
        if not trainer.address.done():
            self.task.result()
        address = trainer.address.result()
        return {"store": address.url, "key": address.key or ""}

    def _run_dir(self) -> Path | None:
        return None if self.runs is None else self.runs / secrets.token_hex(4)

    async def status(self, wait: float) -> dict[str, Any]:
        if self.task is None:
            return {"state": "none"}
        await asyncio.wait({self.task}, timeout=wait)
        if not self.task.done():
            return {"state": "running"}
        error = self.task.exception() if not self.task.cancelled() else None
        if error is not None:
            return {"state": "failed", "error": str(error)}
        result = self.task.result()
        rows = read_metrics(result.run_dir / "metrics.jsonl")
        rewards = [m["reward"] for m in rows if m.get("reward") is not None]
        return {
            "state": "done",
            "steps": rows[-1]["step"] if rows else 0,
            "first_reward": rewards[0] if rewards else None,
            "last_reward": rewards[-1] if rewards else None,
            "checkpoint": None if result.checkpoint is None else str(result.checkpoint),
        }


def create_app(trainings: Trainings, api_key: str | None) -> FastAPI:
    """The server's HTTP side."""

    def check(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if api_key is not None and not hmac.compare_digest(given.encode(), api_key.encode()):
            raise HTTPException(401, "This server needs its key: Client(url, api_key=…) or AGENT_LIGHTNING_API_KEY.")

    app = FastAPI(title="Agent Lightning", dependencies=[Depends(check)])

    @app.post("/data")
    async def data(given: dict[str, list[Any]]) -> dict[str, int]:
        if not given.get("train"):
            raise HTTPException(400, "There are no training tasks: send at least one.")
        trainings.train, trainings.test = given["train"], given.get("test", [])
        return {"train": len(trainings.train), "test": len(trainings.test)}

    @app.post("/train")
    async def train(given: dict[str, Any]) -> dict[str, str]:
        if not trainings.train:
            raise HTTPException(400, "There are no tasks yet: Client.upload_data('train.jsonl') comes first.")
        if trainings.task is not None and not trainings.task.done():
            raise HTTPException(409, "A training runs already; wait for its end.")
        try:
            return await trainings.start(given.get("timeout"), int(given.get("max_retries") or 0))
        except AgentLightningError as error:
            raise HTTPException(400, str(error)) from error

    @app.post("/status")
    async def status(given: dict[str, float]) -> dict[str, Any]:
        return await trainings.status(min(given.get("wait", 0.0), 30.0))

    return app


async def serve(settings: Settings, host: str, port: int, api_key: str | None, runs: Path | None = None) -> None:
    """Serve until cancelled."""
    not_empty(api_key, "AGENT_LIGHTNING_API_KEY")
    if host not in LOOPBACK and api_key is None:
        raise ConfigError(f"Listening on {host} lets others in: set AGENT_LIGHTNING_API_KEY, or listen on 127.0.0.1.")
    make_algorithm(settings, RolloutConfig())  # what is wrong with the settings shows now
    trainings = Trainings(settings, host, runs)
    server = LoopServer(create_app(trainings, api_key), host, port, what="server", error=AgentLightningError)
    await server.start()
    print(f"Agent Lightning trains {settings.name} at http://{host}:{server.port}", flush=True)  # noqa: T201
    try:
        await server.serve()
    finally:
        if trainings.task is not None:
            trainings.task.cancel()
            await asyncio.gather(trainings.task, return_exceptions=True)
        await server.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m agent_lightning.server", description="Trains while clients run agents."
    )
    parser.add_argument("--model", help="a model's name, directory or Hugging Face id")
    parser.add_argument("--algorithm", help=", ".join(ALGORITHMS))
    parser.add_argument("--gpus", type=int, default=None, help="accepted; the device is found by itself")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--config", type=Path, help="a YAML file with the sections model, training, runtime")
    given = parser.parse_args(arguments)
    try:
        settings = read_settings(given.config)
        settings = replace(settings, name=given.model or settings.name, algorithm=given.algorithm or settings.algorithm)
        run_sync(serve(settings, given.host, given.port, os.environ.get("AGENT_LIGHTNING_API_KEY")))
    except AgentLightningError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
