"""Train the calculator with both: python examples/own_algorithm/train.py [STEPS]"""

from __future__ import annotations

import argparse

from advantages import wins_less_losses
from losses import proximal

import agentlightning as agl
from agentlightning.trainer.example import load_example

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", metavar="STEPS", type=int, nargs="?", default=24)
    recipe, agent = load_example("calc", "recipe"), load_example("calc", "calc_agent").calc_agent
    settings = {**recipe.SETTINGS, "steps": parser.parse_args().steps, "update_epochs": 2}
    algorithm = agl.GRPO(model="calc", advantage=wins_less_losses, loss=proximal, **settings)
    agl.Trainer(algorithm=algorithm, concurrency=96).fit(agent, recipe.train_tasks(), recipe.val_tasks())
