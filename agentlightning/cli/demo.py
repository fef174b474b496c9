"""`agl demo`: train an example and show what it was good for."""

from __future__ import annotations

import json
import time
from pathlib import Path
from shlex import quote

from agentlightning.algorithm import GRPO
from agentlightning.algorithm.checkpoint import latest_checkpoint, read_checkpoint
from agentlightning.cli.commands.start import DemoOptions
from agentlightning.cli.interrupt import exit_interrupted
from agentlightning.cli.transcript import before_and_after
from agentlightning.console import Console
from agentlightning.errors import AgentLightningError
from agentlightning.installation import command_name
from agentlightning.metrics import read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer import RunResult, Trainer
from agentlightning.trainer.example import example_dirs, load_example
from agentlightning.trainer.folder import CURVE_FILE, METRICS_FILE, STORE_FILE
from agentlightning.trainer.sync import run_sync

console = Console(highlight=False, soft_wrap=True)


def run_demo(options: DemoOptions) -> None:
    """Train, then print the before and after, the curve, and what to do next; or the examples that there are."""
    if options.listed:
        list_demos()
        return
    name, resume, run_dir = options.name, options.resume, options.run_dir
    model, seed, lora_rank = options.model, options.seed, options.lora_rank
    recipe = load_example(name, "recipe")
    agent = vars(load_example(name, f"{name}_agent"))[vars(recipe).get("AGENT", f"{name}_agent")]
    if resume is not None:
        info = read_checkpoint(latest_checkpoint(resume))
        model, seed, lora_rank = info.base_model, info.seed, info.lora_rank
    own = vars(recipe).get("MODEL", "calc")  # a name, or a function that fetches it and says where it is
    base = model or str(own() if callable(own) else own)
    given = {"steps": options.steps, "learning_rate": options.learning_rate, "lora_rank": lora_rank}
    settings = {**recipe.SETTINGS, **{k: v for k, v in given.items() if v is not None}}
    algorithm = GRPO(model=base, seed=seed, **settings)
    if run_dir is None and resume is None:
        run_dir = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = Trainer(
        algorithm=algorithm, run_dir=run_dir, resume=resume, port=options.port, concurrency=recipe.CONCURRENCY
    )
    train, val = recipe.train_tasks(), recipe.val_tasks()
    try:
        result = trainer.fit(agent, train, val_dataset=val)
    except AgentLightningError:
        if any(trainer.run_dir.glob("checkpoints/step-*")):
            _tell_how_to_resume(name, trainer.run_dir)
        raise
    _conclude(name, result)


def list_demos() -> None:
    """The examples that run by themselves: a line each, and what has to be installed for it."""
    for folder in example_dirs():
        title = (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        console.print(f"{command_name()} demo {folder.name:<10} {title}")
        if (needs := folder / "requirements.txt").is_file():
            console.print(f"  after: pip install -r {needs}")
        if (needs := folder / "package.json").is_file():
            packages = json.loads(needs.read_text(encoding="utf-8"))["dependencies"].items()
            named = ", ".join(f"{name}@{version}" for name, version in packages)
            console.print(f"  after: npm install {named}, in the folder that it then names")


def _conclude(name: str, result: RunResult) -> None:
    if result.stopped:
        console.print("\nStopped.")
        _tell_how_to_resume(name, result.run_dir)
        exit_interrupted()
    rows = [m for m in read_metrics(result.run_dir / METRICS_FILE) if m.get("val_reward") is not None]
    store = SqliteLightningStore(result.run_dir / STORE_FILE)
    try:
        comparison = run_sync(before_and_after(store, last_step=rows[-1]["step"]))
    finally:
        run_sync(store.close())
    if comparison is not None:
        console.print(comparison)
    console.print(f"  {'curve':<12} {result.run_dir / CURVE_FILE}\n  {'metrics':<12} {result.run_dir / METRICS_FILE}")


def _tell_how_to_resume(name: str, run_dir: Path) -> None:
    try:
        checkpoint = latest_checkpoint(run_dir)
    except AgentLightningError:
        console.print("There is no checkpoint yet, so there is nothing to resume: start again.")
        return
    again = f"{command_name()} demo {name} --resume {quote(str(run_dir))}"
    console.print(f"Last checkpoint: {checkpoint}\nGo on with:  {again}")
