"""`agl train`: the GRPO family on any agent, with settings from a file and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from agentlightning.cli.configuration import backend_settings, make_algorithm, told_settings
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError
from agentlightning.gateway import Provider
from agentlightning.litagent import LitAgent
from agentlightning.local_keys import find_key
from agentlightning.store import LightningStoreClient
from agentlightning.trainer import RunResult, Trainer
from agentlightning.trainer.strategy import Strategy
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutConfig

console = Console(highlight=False, soft_wrap=True)


def show_config(
    algorithm: str | None,
    model: str | None,
    config: Path | None,
    settings: Sequence[str],
    backend: str | None,
    backend_options: Sequence[str],
    trust: bool,
) -> None:
    """Print all settings of the algorithm that would train, in the form that `--config` reads."""
    made = make_algorithm(algorithm, model, config, settings, trust=trust, **backend_settings(backend, backend_options))
    typer.echo(json.dumps(told_settings(made), indent=2))


def store_key(server: str | None, file: Path | None) -> str | None:
    """The key of a store that somebody else serves: from a file, from the environment, or where a server of this
    machine keeps it. Raises ConfigError where the file cannot be read."""
    if file is None:
        return os.environ.get("AGL_STORE_KEY") or (find_key(server) if server else None)
    try:
        if key := file.read_text().strip():
            return key
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The key of the store cannot be read from {file}: {error}") from None
    raise ConfigError(f"{file} is empty: it is to hold the key of the store.")


def with_store(server: str, strategy: str | None, key_file: Path | None) -> Strategy:
    """Where the runners of a run are whose store somebody else serves. Raises ConfigError for those that the trainer
    would have to serve it to."""
    if strategy in ("processes", "ray"):
        raise ConfigError(
            f"Runners that are started here are served by this run's own store: leave out --server, or --strategy "
            f"{strategy}. Without --agent the runners of that store run it (agl runner --server URL)."
        )
    key = store_key(server, key_file)
    own = {"AGL_MANAGED_STORE": "0", **({"AGL_STORE_KEY": key} if key else {})}
    return Strategy.read(strategy or "inline", {**os.environ, **own})


def train_agent(
    agent: LitAgent[Any] | None,
    tasks: list[Any],
    val_tasks: list[Any] | None,
    *,
    algorithm: str | None,
    model: str | None,
    config: Path | None,
    settings: Sequence[str],
    backend: str | None,
    backend_options: Sequence[str],
    timeout: float | None,
    concurrency: int,
    n_runners: int,
    strategy: str | None,
    server: str | None,
    key_file: Path | None,
    models: Mapping[str, Provider],
    run_dir: Path | None,
    resume: str | None,
    log: Sequence[str],
    trust: bool,
) -> None:
    """Train, then say what became better and where it is. Raises ConfigError where nobody would run the agent."""
    others = {"rollout_config": RolloutConfig(timeout_seconds=timeout), **backend_settings(backend, backend_options)}
    chosen = make_algorithm(algorithm, model, config, settings, trust=trust, **others)
    if agent is None and strategy != "remote" and (chosen.samples or val_tasks is not None):
        raise ConfigError("Say which agent to train: --agent AGENT; or --remote, if runners on other machines have it.")
    store = None if server is None else LightningStoreClient(server, key=store_key(server, key_file))
    trainer = Trainer(
        algorithm=chosen,
        concurrency=concurrency,
        n_runners=n_runners,
        strategy=strategy if server is None else with_store(server, strategy, key_file),
        store=store,
        models=models,
        run_dir=run_dir,
        resume=resume,
        sinks=log,
    )
    result = _fit(trainer, agent, tasks, val_tasks)
    if result.stopped:
        exit_interrupted()
    if not result.learned:
        raise typer.Exit(1)


def _fit(trainer: Trainer, agent: LitAgent[Any] | None, tasks: list[Any], val_tasks: list[Any] | None) -> RunResult:
    """As `Trainer.fit`; a store of its own that was given is closed."""
    store = trainer.store
    if not isinstance(store, LightningStoreClient):
        return trainer.fit(agent, tasks, val_tasks)

    async def fit() -> RunResult:
        try:
            await store.statistics()  # is it there, and may we?
            return await trainer.fit_async(agent, tasks, val_tasks)
        finally:
            await store.close()

    return run_sync(fit())
