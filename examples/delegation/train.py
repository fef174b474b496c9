"""Train the sub-agent alone: python examples/delegation/train.py [STEPS] [SEED]"""

from __future__ import annotations

import argparse
from typing import Any

import agentlightning as agl
from agentlightning.trainer.example import load_example

SETTINGS: dict[str, Any] = {
    "train_agents": "^sub-agent",
    "tasks_per_step": 8,
    "group_size": 6,
    "minibatches": 2,
    "learning_rate": 4e-4,
    "schedule": "linear",
    "max_context": 256,
    "max_tokens": 32,
}


def train(model: str, *, tasks: int = 600, val: int = 40, run_dir: str | None = None, **settings: Any) -> None:
    """Codex with the planner as its main agent, on repositories of examples/terminal."""
    planner, agent = load_example("delegation", "planner"), load_example("delegation", "delegating_agent")
    made = load_example("terminal", "repositories").make_tasks()
    with planner.planning() as url:
        models = {agent.PLANNER: agl.Provider(base_url=url)}
        algorithm = agl.GRPO(**{**SETTINGS, "model": model, **settings})
        trainer = agl.Trainer(algorithm=algorithm, models=models, concurrency=8, run_dir=run_dir)
        trainer.fit(agent.make_agent(), made["train"][:tasks], val_dataset=made["val"][:val] or None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", metavar="STEPS", type=int, nargs="?", default=16)
    parser.add_argument("seed", metavar="SEED", type=int, nargs="?", default=0)
    given = parser.parse_args()
    train(load_example("tools", "cached").cached_model("delegation"), steps=given.steps, seed=given.seed)
