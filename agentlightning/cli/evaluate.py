"""`agl eval`: a trained model against the one it came from, on the same held-out tasks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.status import Status
from rich.table import Table
from rich.text import Text

from agentlightning.algorithm import Baseline
from agentlightning.algorithm.base import PolicySpec
from agentlightning.algorithm.checkpoint import held_checkpoint, latest_checkpoint, model_path, read_checkpoint
from agentlightning.backend import ModelSpec
from agentlightning.cli.agents import find_agent, find_work
from agentlightning.cli.commands.train import EvalOptions
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.cli.opened import described
from agentlightning.cli.store import location_of
from agentlightning.cli.trust import code_in, require_trust
from agentlightning.console import Console as Terminal, safe
from agentlightning.environments.base import environment_again
from agentlightning.errors import ConfigError
from agentlightning.gateway.settings import CallSettings
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Console, SilentConsole
from agentlightning.metrics.intervals import (
    bounds_of,
    expected_best,
    is_positive,
    mean_interval,
    paired_difference,
    power_words,
)
from agentlightning.trainer import Trainer
from agentlightning.trainer.example import load_agent, load_example
from agentlightning.trainer.folder import STORE_FILE
from agentlightning.trainer.sync import run_sync
from agentlightning.trainer.tasks import load_tasks
from agentlightning.types import Outcome, RolloutMode
from agentlightning.types.finding import counted

terminal = Terminal(highlight=False, soft_wrap=True)
stderr_terminal = Terminal(highlight=False, soft_wrap=True, stderr=True)
"""Messages on the way go here, so that the output itself holds the numbers alone."""


OF_MODELS = ("max_context", "dtype")
OF_CALLS = ("max_calls", "max_tokens", "cut_long_prompts", "renderer")
"""Settings of a training that are those of its evaluation: a rollout ends where it ended then."""


@dataclass(frozen=True, slots=True)
class Served:
    """What is behind the gateway in a measurement."""

    model: str
    policies: Mapping[str, str | None] = field(default_factory=dict)
    """Several policies on the model: each one's adapter."""
    frozen: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those of the run that it was trained in: what they say of contexts, calls and prompts holds here too."""

    @property
    def name(self) -> str:
        """Where its weights are."""
        adapters = [adapter for adapter in self.policies.values() if adapter is not None]
        return str(Path(adapters[0]).parent) if adapters else self.model

    @property
    def spec(self) -> PolicySpec:
        """What is loaded, and how calls are answered."""
        model = ModelSpec(model=self.model, policies=self.policies, frozen=self.frozen, **self._given(OF_MODELS))
        return PolicySpec(model, CallSettings(**self._given(OF_CALLS)))

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self.settings[name] for name in names if name in self.settings}


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """What came of a model's rollouts."""

    rewards: list[float]
    """In the order of the tasks."""
    failed: int
    truncated: int
    """Of those that have not failed: how many were ended by `max_context`, `max_calls` or `max_tokens`."""
    cut_off: int
    """Answers that ended at the `max_tokens` of their request."""
    uncalled: int = 0
    """Of those that have not failed: how many ended without a call of the model."""
    error: str | None = None
    """Why the first that failed did."""


_MARKS = {
    "truncated": "{rollout} ended by max_context, max_calls or max_tokens: what was earned by then counts",
    "cut_off": "{answer} cut off at max_tokens of the request",
    "uncalled": "{rollout} without a call of the model, so what was earned says nothing of it. Give the agent's client "
    "llm.endpoint, llm.api_key and llm.model",
}
_NOTHING = "Nothing was measured of the models: every rollout failed, or ended without a call."


def rollouts_of(options: EvalOptions) -> int:
    """How many rollouts each task has. Raises ConfigError where an estimate needs more than are wanted."""
    needed = max(options.pass_at or 1, options.best_of or 1)
    if options.repeats is not None and options.repeats < needed:
        raise ConfigError(f"The best of {needed} rollouts needs at least {needed} of each task: --repeats {needed}")
    return options.repeats or needed


def estimates_of(options: EvalOptions) -> dict[str, Callable[[Sequence[float]], float]]:
    """What is shown, by its name: functions of a task's rewards."""
    shown: dict[str, Callable[[Sequence[float]], float]] = {"mean reward": fmean}
    if (k := options.pass_at) is not None:
        shown[f"pass@{k}"] = lambda rewards: expected_best([float(r >= options.passing) for r in rewards], k)
    if (n := options.best_of) is not None:
        shown[f"best of {n}"] = lambda rewards: expected_best(rewards, n)
    return shown


def run_evaluation(options: EvalOptions) -> bool:
    """Run both models on the tasks and print a table. Returns whether nothing was measured of them."""
    with held_checkpoint(options.checkpoint) as held:
        return _evaluate(held or options.checkpoint, options)


def _evaluate(checkpoint: Path, options: EvalOptions) -> bool:
    """Whether all rollouts failed or called no model, so that nothing was measured."""
    repeats = rollouts_of(options)
    trained, came_from, run = resolve(checkpoint)
    if came_from is not None:
        run = {"agent": None, **run}  # a checkpoint is of a run, though its run.json may be lost
    named = options.agent or options.environment.env
    require_trust(checkpoint, [*code_in(trained.settings), *own_agent(named, run)], trust=options.trust)
    untrained = came_from if options.base is None else replace(came_from or trained, model=options.base)
    if options.environment.env is None:
        litagent, held_out = _agent_and_tasks(options.agent, options.tasks, run, checkpoint)
    else:
        litagent, tasks, val_tasks = find_work(options.agent, options.tasks, options.environment)
        held_out = val_tasks or tasks
    held_out = held_out[: options.limit]
    if untrained is not None:
        stderr_terminal.print(power_words(len(held_out), is_positive, repeats))
    rewards: dict[str, list[list[float]]] = {}
    found: dict[str, MeasuredModel] = {}
    models = {"base": untrained, "trained" if came_from else "model": trained}
    for label, served in models.items():
        if served is None:
            continue
        with stderr_terminal.status(f"{label}: loading {served.name}") as spinner:
            progress = _Progress(f"{label}: {served.name}", spinner)
            found[label] = measured = measure(served, litagent, held_out, repeats, progress, seed=options.seed)
        rewards[label] = [measured.rewards[i : i + repeats] for i in range(0, len(measured.rewards), repeats)]
        _warn(label, measured)
    names = {label: served and served.name for label, served in models.items()}
    nothing = all(one.failed + one.uncalled == len(one.rewards) for one in found.values())
    if options.as_json:
        shown = {name: _numbers(estimate, rewards) for name, estimate in estimates_of(options).items()}
        counts = {what: {label: getattr(one, what) for label, one in found.items()} for what in ("failed", *_MARKS)}
        terminal.print_json(json.dumps({"models": names, **counts, "repeats": repeats, "estimates": shown}))
        return nothing
    for label in found:
        terminal.print(f"{label}: {names[label]}", markup=False)
    _print_tables(estimates_of(options), rewards, None if nothing else len(held_out))
    return nothing


def _print_tables(
    estimates: Mapping[str, Callable[[Sequence[float]], float]],
    rewards: Mapping[str, Sequence[Sequence[float]]],
    tasks: int | None,
) -> None:
    """A table for each estimate, and what the gain comes to; `tasks` is None where nothing was measured."""
    for name, estimate in estimates.items():
        terminal.print(_table(name, estimate, rewards))
        if "gain" in (numbers := _numbers(estimate, rewards)):
            gain, low, high = numbers["gain"].values()
            terminal.print(f"Gain on the same tasks: [bold]{gain:+.3f}[/bold], 95 % interval {low:+.3f} to {high:+.3f}")
            terminal.print(_NOTHING if tasks is None else _sentence(name, [*rewards][-1], low, high, tasks))


def _warn(label: str, measured: MeasuredModel) -> None:
    """Say which rollouts failed, and why the first did, and which were cut."""
    if measured.failed:
        stderr_terminal.print(f"[yellow]{label}: {counted(measured.failed, 'failed rollout')}, with reward 0[/yellow]")
        stderr_terminal.print(Text(safe(f"The first: {measured.error}"), "yellow"))
    for mark, words in _MARKS.items():
        if count := getattr(measured, mark):
            stderr_terminal.print(f"[yellow]{label}: {_filled(words, count)}[/yellow]")


def _filled(words: str, count: int) -> str:
    return words.format(rollout=counted(count, "rollout"), answer=counted(count, "answer"))


def _sentence(name: str, label: str, low: float, high: float, tasks: int) -> str:
    """What the interval of the gain comes to. `label`: what the model is that is compared with the base."""
    which = "trained model is {} than its" if label == "trained" else "model is {} than the"
    if low > 0:
        return f"The {which.format('better')} base in {name}: the whole interval is above 0."
    if high < 0:
        return f"The {which.format('worse')} base in {name}: the whole interval is below 0."
    more = counted(tasks, "task")
    return f"No difference in {name} is shown: 0 is in the interval. More than {more}, or --repeats, narrow it."


def _numbers(
    estimate: Callable[[Sequence[float]], float], rewards: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, dict[str, float]]:
    """An estimate of each model with its 95 % interval; of two models also the paired difference, as `gain`."""
    bounds = bounds_of([reward for tasks in rewards.values() for task in tasks for reward in task])
    values = {label: [estimate(task) for task in tasks] for label, tasks in rewards.items()}
    found: dict[str, dict[str, float]] = {}
    for label, of_tasks in values.items():
        low, high = mean_interval(of_tasks, bounds=bounds)
        found[label] = {"value": fmean(of_tasks), "low": low, "high": high, "tasks": len(of_tasks)}
    if len(values) == 2:
        base, other = values.values()
        gain, (low, high) = paired_difference(base, other, bounds=bounds)
        found["gain"] = {"value": gain, "low": low, "high": high}
    return found


class _Progress(SilentConsole):
    """Shows what the algorithm says of its progress behind the name of what is measured."""

    def __init__(self, what: str, spinner: Status) -> None:
        self._what = what
        self._spinner = spinner

    def status(self, text: str) -> None:
        self._spinner.update(f"{self._what}: {text}")


def measure(
    served: Served,
    agent: LitAgent[Any],
    tasks: list[Any],
    repeats: int = 1,
    progress: Console | None = None,
    *,
    seed: int = 0,
) -> MeasuredModel:
    """Run the agent on the tasks, through the gateway. With the same seed, models draw alike."""
    algorithm = Baseline(served=served.spec, repeats=repeats, mode=RolloutMode.TEST, seed=seed)
    with tempfile.TemporaryDirectory(prefix="agl-eval-") as folder:
        result = Trainer(algorithm=algorithm, run_dir=folder, console=progress or SilentConsole()).fit(agent, tasks)
    if result.stopped:
        terminal.print("Stopped: there is nothing to compare yet.")
        exit_interrupted()
    episodes = algorithm.episodes
    failed = [e for e in episodes if not e.good]
    outcomes = [e.outcome for e in episodes]
    return MeasuredModel(
        [e.reward or 0.0 for e in episodes],
        failed=len(failed),
        error=next(((e.attempt and e.attempt.error) or e.outcome.value for e in failed), None),
        truncated=outcomes.count(Outcome.TRUNCATED),
        uncalled=sum(e.good and not e.calls for e in episodes),
        cut_off=sum(c.info.finish_reason == "length" for e in episodes if e.outcome is Outcome.OK for c in e.calls),
    )


def resolve(checkpoint: Path) -> tuple[Served, Served | None, dict[str, Any]]:
    """The model to measure, the one it came from, and what is known of the run."""
    try:
        found = latest_checkpoint(checkpoint)
    except ConfigError:
        return Served(str(checkpoint)), None, {}
    run = described(found.parent.parent)
    weights, info = model_path(found), read_checkpoint(found)
    base = Served(info.base_model, dict.fromkeys(info.policies), info.frozen, run.get("settings", {}))
    if not info.policies:
        return replace(base, model=str(weights)), base, run
    return replace(base, policies={name: str(weights / name) for name in info.policies}), base, run


def _agent_and_tasks(
    agent: str | None, tasks: Path | None, run: dict[str, Any], checkpoint: Path
) -> tuple[LitAgent[Any], list[Any]]:
    """The agent and tasks that are given; else the run's agent, and an example's held-out tasks or the run's own."""
    example = _example(run)
    if tasks is not None:
        held_out = load_tasks(tasks)
    elif example is not None and agent is None:
        held_out = load_example(example, "recipe").test_tasks()
        if not run:
            stderr_terminal.print(f"No run is known of it: its agent and tasks are those of the example {example}.")
    else:
        held_out = run_sync(_validation_tasks(latest_checkpoint(checkpoint).parent.parent)) if run else []
        if not held_out:
            raise ConfigError("There are no validation tasks of a run: give tasks with --tasks FILE.")
        stderr_terminal.print(f"On the {counted(len(held_out), 'validation task')} of the run.")
    return (find_agent(agent) if agent is not None else agent_of_run(run)), held_out


def agent_of_run(run: dict[str, Any]) -> LitAgent[Any]:
    """The agent that a run's `run.json` names. Raises ConfigError where it is not known."""
    if run.get("environment"):
        return environment_again(run["environment"]).agent
    if (example := _example(run)) is not None:
        return vars(load_example(example, f"{example}_agent"))[f"{example}_agent"]
    source = run.get("source")
    if source is None or not Path(source).is_file():
        raise ConfigError(
            "The agent of this run is not known. Give it with --agent: file.py:name, or a command; or --env."
        )
    return load_agent(f"{source}:{run['agent']}")


def own_agent(agent: str | None, run: Mapping[str, Any]) -> list[str]:
    """The agent that would be imported because the run names it; examples are this package's own."""
    if agent is None and run.get("environment"):
        return [f"the environment {run['environment'].get('spec')}"]
    if agent is not None or not run.get("source") or _example(dict(run)) is not None:
        return []
    return [f"the agent {run['source']}:{run.get('agent')}"]


async def _validation_tasks(run_dir: Path) -> list[Any]:
    """What the run validated on, each task once, in the order in which it did."""
    file = run_dir / STORE_FILE
    if not file.is_file():
        return []
    async with location_of(file).reading() as store:
        found = await store.query_rollouts(sort_by="start_time")
    return [json.loads(text) for text in dict.fromkeys(json.dumps(r.input) for r in found if r.mode is RolloutMode.VAL)]


def _example(run: dict[str, Any]) -> str | None:
    """The example that the run's agent is, wherever it was installed; that of a model without a run is `calc`."""
    if not run:
        return "calc"
    source = Path(run.get("source") or "")
    name = source.parent.name
    return name if source.name == f"{name}_agent.py" and run.get("agent") == source.stem else None


def _table(
    name: str,
    estimate: Callable[[Sequence[float]], float],
    rewards: Mapping[str, Sequence[Sequence[float]]],
) -> Table:
    """A row per model. The interval is over tasks, whose rollouts belong together."""
    table = Table("", name, "95 % interval", "tasks", "rollouts")
    for label, found in _numbers(estimate, rewards).items():
        if label != "gain":
            interval = f"{found['low']:.3f} – {found['high']:.3f}"
            counts = str(found["tasks"]), str(sum(map(len, rewards[label])))
            table.add_row(label, f"{found['value']:.3f}", interval, *counts)
    return table
