"""`agl doctor`: a few rollouts of an agent, looked at before minutes or days are spent on training it."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentlightning.algorithm import Baseline
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.stall import phase_of
from agentlightning.cli.agents import find_work
from agentlightning.cli.commands.start import DoctorOptions
from agentlightning.cli.opened import opened_run
from agentlightning.cli.why import decoder_of_model, shown, template_of_model
from agentlightning.console import terminal
from agentlightning.doctor import Diagnosis, Plan, examine
from agentlightning.errors import ConfigError
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.keys import not_empty
from agentlightning.litagent import LitAgent
from agentlightning.metrics import SilentConsole
from agentlightning.models.hardware import memory_of
from agentlightning.models.shape import read_shape
from agentlightning.runner import blocking
from agentlightning.trainer import Trainer
from agentlightning.trainer.folder import new_folder
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutMode

ENOUGH = 8
"""Rollouts that there must be to say something of them, however few tasks there are."""
LATER = 3
"""One of so many begins when others have ended: what an agent keeps from rollout to rollout is seen in those alone."""


def examine_agent(options: DoctorOptions) -> bool:
    """Run the rollouts, and print the diagnosis. Returns whether there is a problem."""
    agent, tasks, _ = find_work(options.agent, options.tasks, options.environment, options.program)
    if options.model and options.endpoint:
        raise ConfigError("Give --model or --endpoint, not both.")
    with tempfile.TemporaryDirectory(prefix="agl-doctor-") as folder:
        found = run_sync(_examine(agent, tasks, options, Path(folder)))
    if options.as_json:
        terminal().print_json(json.dumps(found.to_json()))
    else:
        terminal().print(shown(found))
    return bool(found.problems)


async def _examine(agent: LitAgent[Any], tasks: list[Any], options: DoctorOptions, folder: Path) -> Diagnosis:
    tasks = tasks[: options.limit]
    repeats = max(options.repeats, -(-ENOUGH // len(tasks))) if tasks else options.repeats
    at_once = at_a_time(len(tasks) * repeats, options.concurrency)
    trainer, model = _trainer(replace(options, repeats=repeats, concurrency=at_once), folder)
    stop = asyncio.Event()
    late = asyncio.get_running_loop().call_later(options.seconds, stop.set)
    try:
        with _warnings_of(blocking.logger) as blocked:
            await trainer.fit_async(agent, tasks, stop=stop)
    finally:
        late.cancel()
    shape = read_shape(model) if model is not None else None
    memory = memory_of("auto")[0] if shape is not None else None
    plan = Plan(
        rollouts_per_step=options.group_size * options.tasks_per_step,
        concurrency=options.concurrency,
        shape=shape,
        memory=memory,
        max_context=options.max_context,
    )
    return await _read(trainer, plan, options, blocked, model)


def at_a_time(rollouts: int, concurrency: int) -> int:
    """How many of them run at the same time: not all, so that some come after others."""
    return max(1, min(concurrency, rollouts - rollouts // LATER))


async def _read(
    trainer: Trainer, plan: Plan, options: DoctorOptions, blocked: list[str], model: str | None
) -> Diagnosis:
    async with opened_run(trainer.run_dir) as opened:
        evidence = await opened.evidence()
        total = (await opened.store.query_rollouts(limit=0)).total
    done = [e for e in evidence.episodes if e.outcome != "cancelled"]
    late = [e for e in evidence.episodes if e.outcome == "cancelled"]
    spans = [evidence.spans.get(e.rollout.rollout_id, ()) for e in late]
    phases = Counter(phase_of(own[-1] if own else None, waits_for_model=False) for own in spans)
    provider = options.endpoint is not None
    refused_requests = trainer.algorithm.context.refused_requests
    evidence = replace(evidence, episodes=done, provider=provider, refused_requests=dict(refused_requests))
    known = {"decode": decoder_of_model(model), "template": template_of_model(model)}
    known |= {"phases": phases, "calls_so_far": [len(e.calls) for e in late]}
    unfinished = total - len(done)
    if unfinished <= total // LATER:  # so few may only have begun later
        unfinished = len(longer_than_others(late, done))
    return examine(evidence, plan, blocked=blocked, unfinished=unfinished, **known)


def longer_than_others(late: Sequence[Episode], done: Sequence[Episode]) -> list[Episode]:
    """The rollouts without an end that had run for longer than any that came to its end."""
    slowest = max((_seconds(episode) for episode in done), default=0.0)
    return [episode for episode in late if _seconds(episode) > slowest]


def _seconds(episode: Episode) -> float:
    attempt = episode.attempt
    return 0.0 if attempt is None else (attempt.end_time or time.time()) - attempt.start_time


def _trainer(options: DoctorOptions, folder: Path) -> tuple[Trainer, str | None]:
    """The dry run, and the model it is on; None where a provider's is asked."""
    providers: dict[str, Provider] = {}
    model = None if options.endpoint else options.model or "calc"
    if options.endpoint:
        key = not_empty(options.api_key, "--api-key")
        providers["llm"] = Provider(base_url=options.endpoint, api_key=key, model=options.endpoint_model)
    algorithm = Baseline(
        model=model,
        repeats=options.repeats,
        mode=RolloutMode.TRAIN,
        max_context=options.max_context,
        max_concurrency=options.concurrency,
    )
    return (
        Trainer(
            algorithm=algorithm,
            models=providers,
            concurrency=options.concurrency,
            run_dir=new_folder(folder / "run"),
            console=SilentConsole(),
        ),
        model,
    )


@contextmanager
def _warnings_of(logger: logging.Logger) -> Iterator[list[str]]:
    """What a logger warns of meanwhile, which is then not printed."""
    warnings: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    listener, before = Listener(), logger.propagate
    logger.addHandler(listener)
    logger.propagate = False
    try:
        yield warnings
    finally:
        logger.removeHandler(listener)
        logger.propagate = before
