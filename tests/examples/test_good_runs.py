"""Best-of-n rollouts → fine-tuning on the good ones → a better agent, on the shipped model and its calculator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.algorithm.baseline import Baseline
from agentlightning.errors import ConfigError
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.trainer.example import load_example
from tests.typed import typed

AGENT = Path("examples/calc/calc_agent.py").resolve()


def calc(module: str) -> Any:
    return load_example("calc", module)


def sample(folder: Path, tasks: list[Any], repeats: int) -> None:
    """What the model as it ships says to these tasks."""
    settings: dict[str, Any] = {"max_context": 512, "max_concurrency": 64}
    algorithm = Baseline(model="calc", repeats=repeats, **settings)
    trainer = agl.Trainer(algorithm=algorithm, concurrency=96, run_dir=folder, console=SilentConsole())
    trainer.fit(calc("calc_agent").calc_agent, tasks)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_good_rollouts_make_a_better_agent(tmp_path: Path) -> None:
    """At least 15 points on tasks that no part of it has seen; the command says the same as the library."""
    recipe = calc("recipe")
    tasks, held_out = recipe.train_tasks()[:96], recipe.test_tasks()[:160]
    sample(tmp_path / "sampled", tasks, repeats=8)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("tasks", "held_out")}
    for file, rows in zip(files.values(), (tasks, held_out), strict=True):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "from_run": tmp_path / "sampled",
        "min_reward": 1,
        "best_of": 4,
        "epochs": 2,
        "tasks_per_step": 12,
        "learning_rate": 2e-4,
        "max_context": 512,
        "val_every": 1000,
    }
    named = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [
        *("-m", "agentlightning", "train", "--algorithm", "sft", "--agent", f"{AGENT}:calc_agent"),
        *("--tasks", str(files["tasks"]), "--val-tasks", str(files["held_out"])),
        *("--concurrency", "96", "--run-dir", "tuned", *named),
    ]
    done = typed(tmp_path, *command)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = read_metrics(tmp_path / "tuned" / "metrics.jsonl")
    before, after = (m["val_reward"] for m in (steps[0], steps[-1]))
    assert after >= before + 0.15, f"held-out reward {before:.3f} -> {after:.3f}"
    assert all("kl_old" not in m for m in steps), "nothing was sampled by this run"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_tasks_that_the_run_never_had_are_told(tmp_path: Path) -> None:
    recipe = calc("recipe")
    sample(tmp_path / "sampled", recipe.train_tasks()[:4], repeats=1)
    algorithm = agl.SFT(model="calc", from_run=tmp_path / "sampled", max_context=512, steps=1)
    trainer = agl.Trainer(algorithm=algorithm, run_dir=tmp_path / "tuned", console=SilentConsole())
    with pytest.raises(ConfigError, match="None of the training tasks"):
        trainer.fit(calc("calc_agent").calc_agent, recipe.test_tasks()[:4])
