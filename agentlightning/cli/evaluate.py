"""`agl eval`: a trained model against the one it came from, on the same held-out tasks."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentlightning.algorithm import Baseline
from agentlightning.algorithm.checkpoint import latest_checkpoint, model_path, read_checkpoint
from agentlightning.cli.agents import find_agent, read_tasks
from agentlightning.cli.example import load_example
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent
from agentlightning.metrics import SilentConsole
from agentlightning.metrics.intervals import mean_interval, paired_difference
from agentlightning.trainer import Trainer
from agentlightning.trainer.trainer import RUN_FILE
from agentlightning.types import Outcome, RolloutMode

console = Console(highlight=False, soft_wrap=True)


def run_evaluation(
    checkpoint: Path, *, agent: str | None, tasks: Path | None, base: str | None, limit: int, repeats: int
) -> None:
    """Run both models on the tasks and print a table."""
    trained, default_base, run = _resolve(checkpoint)
    base = base or default_base
    litagent, held_out = _agent_and_tasks(agent, tasks, run)
    held_out = held_out[:limit]
    rewards: dict[str, list[float]] = {}
    for label, model in {"base": base, "trained": trained}.items():
        if model is None:
            continue
        with console.status(f"{label}: {model}: {len(held_out)} tasks × {repeats}"):
            rewards[label], failed = measure(model, litagent, held_out, repeats)
        if failed:
            console.print(f"[yellow]{label}: {failed} rollouts failed and count as reward 0[/yellow]")
    console.print(_table(rewards, {"base": base, "trained": trained}))
    if len(rewards) == 2:
        gain, (low, high) = paired_difference(rewards["base"], rewards["trained"])
        console.print(f"Gain on the same tasks: [bold]{gain:+.3f}[/bold], 95 % interval {low:+.3f} to {high:+.3f}")


def measure(model: str, agent: LitAgent[Any], tasks: list[Any], repeats: int = 1) -> tuple[list[float], int]:
    """Rewards in the order of the tasks, through the gateway; and how many rollouts failed."""
    algorithm = Baseline(model=model, repeats=repeats, mode=RolloutMode.TEST)
    with tempfile.TemporaryDirectory(prefix="agl-eval-") as folder:
        Trainer(algorithm=algorithm, run_dir=folder, console=SilentConsole()).fit(agent, tasks)
    episodes = algorithm.episodes
    failed = sum(e.outcome not in (Outcome.OK, Outcome.TRUNCATED) for e in episodes)
    return [e.reward or 0.0 for e in episodes], failed


def _resolve(checkpoint: Path) -> tuple[str, str | None, dict[str, Any]]:
    """The model to measure, the one it came from, and what is known of the run."""
    try:
        found = latest_checkpoint(checkpoint)
    except ConfigError:
        return str(checkpoint), None, {}
    run_file = found.parent.parent / RUN_FILE
    run = json.loads(run_file.read_text()) if run_file.is_file() else {}
    return str(model_path(found)), read_checkpoint(found).base_model, run


def _agent_and_tasks(agent: str | None, tasks: Path | None, run: dict[str, Any]) -> tuple[LitAgent[Any], list[Any]]:
    source, name = run.get("source"), run.get("agent")
    example = Path(source).parent.name if source else "calc"
    if agent is None and (source is None or not Path(source).is_file()) and example != "calc":
        raise ConfigError("The agent of this run is not known. Give it with --agent path/to/file.py:name.")
    if tasks is None:
        recipe = load_example(example, "recipe")
        held_out = recipe.test_tasks()
    else:
        held_out = read_tasks(tasks)
    if agent is None:
        return load_example(example, f"{example}_agent").__dict__[name or f"{example}_agent"], held_out
    return find_agent(agent), held_out


def _table(rewards: dict[str, list[float]], models: dict[str, str | None]) -> Table:
    table = Table("", "mean reward", "95 % interval", "rollouts")
    table.add_column("model", overflow="fold")
    for label, values in rewards.items():
        low, high = mean_interval(values)
        mean = sum(values) / len(values)
        table.add_row(label, f"{mean:.3f}", f"{low:.3f} – {high:.3f}", str(len(values)), str(models[label]))
    return table
