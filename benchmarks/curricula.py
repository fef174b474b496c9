"""Curricula against every task once per epoch, on a task set of mixed difficulty, for the same number of rollouts.

    python benchmarks/curricula.py [--steps 30] [--seeds 3] [--only learnability,unsolved] [--quick] [--json]

A third of the tasks are the calculator's questions; of a third every rollout earns 1, of a third none earns anything,
so that their groups teach nothing. Each run is a fresh process that trains the shipped model and validates on held-out
questions of the first kind. A row per curriculum: means over the seeds, with the range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentlightning.metrics import read_metrics

WORKER = """
import json, sys
import agentlightning as agl
from agentlightning.trainer.example import load_example
from agentlightning.metrics import SilentConsole

recipe, calc = load_example("calc", "recipe"), load_example("calc", "calc_agent")
given = json.loads(sys.argv[1])


@agl.rollout
async def mixed(task, llm):
    earned = await calc.calc_agent(task, llm)
    return {"easy": 1.0, "impossible": 0.0}.get(task.get("kind"), earned)


questions = recipe.train_tasks()[60 * given["seed"] :]
kinds = ("learnable", "easy", "impossible")
tasks = [{**question, "kind": kinds[i % 3]} for i, question in enumerate(questions[:60])]
algorithm = agl.GRPO(
    model="calc", steps=given["steps"], tasks_per_step=6, group_size=8, learning_rate=2e-4, max_context=512,
    val_every=1000, save_every=1000, seed=given["seed"], curriculum=given["curriculum"], flat_steps=0, val_repeats=2,
)
agl.Trainer(algorithm=algorithm, run_dir="run", concurrency=96, console=SilentConsole()).fit(
    mixed, tasks, recipe.val_tasks()
)
"""


def run(curriculum: str | None, steps: int, seed: int) -> list[dict[str, Any]]:
    """One training run in a process of its own; its metrics."""
    given = json.dumps({"curriculum": curriculum, "steps": steps, "seed": seed})
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", WORKER, given]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
        if done.returncode:
            raise SystemExit(f"{curriculum} failed:\n{done.stderr[-3000:]}")
        return read_metrics(Path(folder) / "run" / "metrics.jsonl")


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, list[float]]:
    """By name, a value per seed."""
    return {
        "before": [rows[0]["val_reward"] for rows in runs],
        "after": [rows[-1]["val_reward"] for rows in runs],
        "flat": [statistics.mean(m["flat_groups"] for m in rows[1:]) for rows in runs],
        "rollouts": [float(sum(m["rollouts"] for m in rows[1:])) for rows in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="curricula, separated by commas, beside none")
    parser.add_argument("--quick", action="store_true", help="one curriculum, one seed, three steps")
    parser.add_argument("--json", action="store_true", help="end with the figures as one line of JSON")
    arguments = parser.parse_args()
    names = (arguments.only or "learnability,unsolved,pools").split(",")
    if arguments.quick:
        names, arguments.steps, arguments.seeds = ["learnability"], 3, 1
    console = Console()
    figures: dict[str, dict[str, list[float]]] = {}
    for name in (None, *names):
        found = summary([run(name, arguments.steps, seed) for seed in range(arguments.seeds)])
        figures[name or "none"] = found
        console.print(f"{name or 'none'}: {found['before']} → {found['after']}, flat groups {found['flat']}")
    shown = Table("curriculum", "before", "after", "flat groups", "rollouts", title=f"{arguments.steps} steps")
    for name, found in figures.items():
        cells = [f"{statistics.mean(v):.2f} ({min(v):.2f}–{max(v):.2f})" for k, v in found.items() if k != "rollouts"]
        shown.add_row(name, *cells, f"{statistics.mean(found['rollouts']):.0f}")
    console.print(shown)
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
