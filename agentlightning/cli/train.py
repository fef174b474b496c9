"""`agl train`: the GRPO family on any agent, with settings from a file and the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import typer

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.checkpoint import latest_checkpoint
from agentlightning.algorithm.parts.checkpoint_copy import is_url
from agentlightning.cli.agents import environment_of, find_agent
from agentlightning.cli.commands.train import TrainOptions
from agentlightning.cli.configuration import (
    RepeatedRun,
    backend_settings,
    folder_of_run,
    make_algorithm,
    of_data,
    run_of_config,
    settings_for_file,
)
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.cli.trust import require_trust
from agentlightning.cli.upstream import read_upstreams
from agentlightning.console import Console
from agentlightning.environments.base import Environment, environment_again
from agentlightning.errors import ConfigError
from agentlightning.files import reason_of_file
from agentlightning.litagent import LitAgent
from agentlightning.net.local_keys import find_key
from agentlightning.store import LightningStoreClient
from agentlightning.trainer import RunResult, Trainer
from agentlightning.trainer.live import RUN_FILE
from agentlightning.trainer.strategy import Strategy
from agentlightning.trainer.sync import run_sync
from agentlightning.trainer.tasks import load_tasks
from agentlightning.types import RolloutConfig

console = Console(highlight=False, soft_wrap=True)


def show_config(options: TrainOptions) -> None:
    """Print all settings of the algorithm that would train, in the form that `--config` reads."""
    typer.echo(json.dumps(settings_for_file(_algorithm(options)), indent=2))


def _algorithm(options: TrainOptions, **others: Any) -> GRPO:
    given = {**others, **backend_settings(options.computed)}
    return make_algorithm(
        options.algorithm, options.model, options.config, options.settings, trust=options.trust, **given
    )


def store_key(server: str | None, file: Path | None) -> str | None:
    """The key of a store that somebody else serves: from a file, from the environment, or where a server of this
    machine keeps it. Raises ConfigError where the file cannot be read."""
    if file is None:
        return os.environ.get("AGL_STORE_KEY") or (find_key(server) if server else None)
    try:
        if key := file.read_text().strip():
            return key
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The key of the store cannot be read from {file}: {reason_of_file(error)}") from None
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


def train_agent(options: TrainOptions) -> None:
    """Train, then say what became better and where it is. Raises ConfigError where nobody would run the agent."""
    options = _completed(options)
    if options.print_config:
        show_config(options)
        return
    server, (agent, train, val) = options.server, _work_of(options)
    models = read_upstreams(options.providers)
    chosen = _algorithm(options, rollout_config=RolloutConfig(timeout_seconds=options.timeout))
    strategy = "remote" if options.remote or (server and agent is None) else options.strategy
    if agent is None and strategy != "remote" and (chosen.samples or val is not None):
        chats = " Conversations to learn are given as --data FILE." if _are_chats(train) else ""
        raise ConfigError(
            f"Say which agent to train: --agent AGENT; or --remote, if runners on other machines have it.{chats}"
        )
    _check_data(chosen, train, options.data)
    trainer = Trainer(
        algorithm=chosen,
        concurrency=options.concurrency,
        n_runners=options.n_runners,
        strategy=strategy if server is None else with_store(server, strategy, options.key_file),
        store=None if server is None else LightningStoreClient(server, key=store_key(server, options.key_file)),
        models=models,
        run_dir=options.run_dir,
        resume=options.resume,
        sinks=options.log,
    )
    result = _fit(trainer, agent, train, val)
    if result.stopped:
        exit_interrupted()
    if not result.learned:
        raise typer.Exit(1)


class _Work(NamedTuple):
    """What a training is about: its agent, which may be elsewhere, and its tasks."""

    agent: LitAgent[Any] | None
    train: list[Any]
    val: list[Any] | None


def _work_of(options: TrainOptions) -> _Work:
    """The agent and the tasks of the options, of their environment, or of the run that --config names. Raises
    ConfigError where there are no tasks."""
    reference, tasks, val_tasks = options.agent, options.tasks, options.val_tasks
    known = run_of_config(options.config)
    environment = environment_of(options.environment, reference, options.program)
    if tasks is None:
        tasks, val_tasks = known.tasks, val_tasks or known.val_tasks
    if tasks is None and environment is None:
        if options.resume is not None:
            _refuse_resume(options.resume)
        raise ConfigError(
            "There are no tasks to train on: give --tasks FILE, --env with an environment, --data FILE with "
            "conversations, or --config with the run.json of a run."
        )
    own_agent = not options.remote and options.data is None and options.server is None
    if reference is None and environment is None and own_agent:
        reference, environment = _of_run(known, options)
    if environment is None:
        agent = None if reference is None else find_agent(reference, options.program)
    else:
        agent = environment.agent
        if not options.remote:
            environment.check()
    train = load_tasks(tasks) if tasks is not None else list(environment.tasks() if environment else ())
    val = load_tasks(val_tasks) if val_tasks else (list(environment.val_tasks()) or None if environment else None)
    return _Work(agent, train, val)


def _refuse_resume(resume: str) -> None:
    """Raises ConfigError for a run that is to go on without its tasks, and for one that is not there."""
    if not is_url(resume):
        found = latest_checkpoint(Path(resume))
        run = next((folder for folder in (found, *found.parents) if (folder / RUN_FILE).is_file()), Path(resume))
        raise ConfigError(
            f"A run that goes on is given its agent and tasks again. To take those that it had:  --resume {resume} "
            f"--config {run / RUN_FILE} --trust"
        )


def _are_chats(tasks: Sequence[Any]) -> bool:
    return bool(tasks) and isinstance(tasks[0], Mapping) and "messages" in tasks[0]


def _check_data(algorithm: GRPO, train: Sequence[Any], file: Path | None) -> None:
    """Raises ConfigError for conversations that cannot be learned, with the file that they are in."""
    try:
        if file is not None:
            algorithm.check_data(train)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _of_run(known: RepeatedRun, options: TrainOptions) -> tuple[str | None, Environment | None]:
    """The agent or the environment of the run that --config names, which are imported if it is trusted."""
    named = known.agent and f"the agent {known.agent}"
    if known.environment is not None:
        named = f"the environment {known.environment.get('spec')}"
    if named is not None and options.config is not None:
        require_trust(options.config, [named], trust=options.trust)
    if known.environment is None:
        return known.agent, None
    return None, environment_again(known.environment)


def _completed(options: TrainOptions) -> TrainOptions:
    """Options that are short for others, as those others: `--steps` is a setting, `--name` a folder."""
    settings = [f"{name}={value}" for name in ("steps", "seed") if (value := getattr(options, name)) is not None]
    for text in settings:
        if twice := [own for own in options.settings if own.partition("=")[0] == text.partition("=")[0]]:
            raise ConfigError(
                f"--{text.replace('=', ' ')} and --set {twice[0]} are the same setting: give one of them."
            )
    options = replace(options, settings=[*options.settings, *settings])
    if options.name is not None:
        options = replace(options, run_dir=folder_of_run(options.name, options.run_dir))
    if options.data is not None:
        algorithm, tasks, settings = of_data(options.data, options.algorithm, options.tasks, options.settings)
        options = replace(options, algorithm=algorithm, tasks=tasks, settings=settings)
        _refuse_options_of_rollouts(options)
    if options.address is not None:
        backends = (options.computed.backend, *(own.partition("backend=")[2] for own in options.settings))
        if options.config is None and "ray" not in backends:
            raise ConfigError("--address has no effect: it is for --backend ray.")
        given = [*options.computed.backend_option, f"address={options.address}"]
        options = replace(options, computed=replace(options.computed, backend_option=given))
    return options


def _refuse_options_of_rollouts(options: TrainOptions) -> None:
    """Raises ConfigError for options of rollouts, where `--data` is learned and there is no agent to run."""
    if options.agent or options.environment.env or options.remote or options.server or options.config:
        return
    plain = TrainOptions()
    for name in ("timeout", "concurrency", "n_runners", "strategy"):
        if getattr(options, name) != getattr(plain, name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} has no effect: it is for an agent's rollouts, and --data alone has none.")


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
