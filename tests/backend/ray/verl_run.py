"""`python -m tests.backend.ray.verl_run RUN_DIR STEPS`: the calculator, learned by two of verl's workers on a cluster
of this machine alone."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import agentlightning as agl
from agentlightning.cli.example import load_example

OPTIONS = {"learner": "verl", "cpus_per_runner": 0.5, "wait_seconds": 60.0}


async def main(run_dir: Path, steps: int) -> None:
    logging.basicConfig(level=logging.WARNING)
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    settings: dict[str, Any] = {**recipe.SETTINGS, "steps": steps, "schedule": "constant"}
    settings |= {"val_every": steps, "save_every": 1, "ranks": 2}
    made = agl.GRPO(model="calc", backend="ray", backend_options=OPTIONS, **settings)
    trainer = agl.Trainer(algorithm=made, n_runners=1, run_dir=run_dir)
    await trainer.fit_async(agent, recipe.train_tasks(), recipe.val_tasks())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
